"""How long a serving engine computes no token while it takes up a version: SmolLM2-135M, bfloat16, eight requests that run on.

Each version changes about one percent of the weights. The pause is the time for which the update holds the lease on the cores,
between two steps; what is fetched and applied before runs beside them. The reference is loading a version whole, into an engine
that starts: it reads the anchor first.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Literal

import numpy as np

from everlong.cli.bench import Row
from everlong.cli.benches.engine import requests
from everlong.cli.benches.prompts import Windows
from everlong.cli.benches.smollm2 import open_smollm2
from everlong.engines.config import EmbeddedConfig
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet

TURNS, RUNNING, PROMPT_TOKENS = 5, 8, 64
SHARE = 0.01


class TimedLease(asyncio.Lock):
    """Knows how long each task has held it, last."""

    def __init__(self) -> None:
        super().__init__()
        self.held_s: dict[asyncio.Task[object] | None, float] = {}
        self._since = 0.0

    async def acquire(self) -> Literal[True]:
        await super().acquire()
        self._since = time.perf_counter()
        return True

    def release(self) -> None:
        self.held_s[asyncio.current_task()] = time.perf_counter() - self._since
        super().release()


def measure() -> list[Row]:
    """Raises FileNotFoundError where the weights are not installed."""
    return asyncio.run(_measure())


async def _measure() -> list[Row]:
    lease = TimedLease()
    cell = await open_smollm2(EmbeddedConfig(max_running=RUNNING), lease=lease)
    reader, publisher, windows = WeightReader(cell.store), WeightPublisher(cell.store, 1000), Windows(cell.tokenizer)
    old = reader.read(0)
    pauses, wholes = [], []
    try:
        for turn in range(1, 1 + TURNS):
            new = _moved(old, turn)
            publisher.publish(new, old)
            serving = asyncio.gather(
                *(cell.engine.generate(r) for r in requests([windows.take(PROMPT_TOKENS) for _ in range(RUNNING)]))
            )
            await asyncio.sleep(0.2)
            update = asyncio.create_task(cell.engine.update(turn))
            await update
            pauses.append(lease.held_s[update])
            await serving
            started = time.perf_counter()
            reader.read(turn)
            wholes.append(time.perf_counter() - started + lease.held_s[update])
            old = new
    finally:
        await cell.close()
    pause, whole = statistics.median(pauses), statistics.median(wholes)
    return [
        Row(f"pause, 135M, {RUNNING} requests running", "pause_s", "s", pause, "reading it whole", whole, whole / pause)
    ]


def _moved(old: WeightSet, turn: int) -> WeightSet:
    """One unit in the last place further, here and there."""
    rng, tensors = np.random.default_rng(turn), {}
    for name, tensor in old.tensors.items():
        bits = tensor.flat().copy()
        bits[rng.integers(0, bits.size, max(1, int(SHARE * bits.size)))] ^= 1
        tensors[name] = RawTensor(tensor.dtype, tensor.shape, bits.reshape(tensor.shape))
    return WeightSet(turn, tensors)
