"""One RL step and one version through adapters of rank 16 against training every weight: SmolLM2-135M, bfloat16.

A step is that of the bench `step`: a group of 8 answers of 64 tokens to a prompt of 128, one gradient, one update, published
and loaded. Adapters take ten times the learning rate of the whole, as they commonly need. Bytes are those of a version after
the first, which is a delta; how large it is hangs on the learning rate. One side after the other, since both at once need 9 GB: trust the processor's time.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence

from everlong.cli.bench import Row
from everlong.cli.benches.prompts import Windows
from everlong.cli.benches.smollm2 import open_smollm2
from everlong.cli.benches.step import PROMPT_TOKENS, StepCost, rl_step
from everlong.engines.config import EmbeddedConfig
from everlong.models.adapter_config import LoraConfig

TURNS = 2
RATE = 1e-5
"""Of the whole; adapters take ten times as much."""


def measure() -> list[Row]:
    return asyncio.run(_measure())


async def _measure() -> list[Row]:
    adapters, adapter_bytes = await _side(LoraConfig(rank=16), 10 * RATE)
    whole, whole_bytes = await _side(None, RATE)
    return [*_rows(adapters, whole), _row("checkpoint", "bytes", adapter_bytes, whole_bytes)]


async def _side(adapter: LoraConfig | None, learning_rate: float) -> tuple[list[StepCost], float]:
    """What the steps of one side cost, and the bytes of its checkpoint."""
    cell = await open_smollm2(EmbeddedConfig(), adapter, learning_rate)
    windows = Windows(cell.tokenizer)
    try:
        costs = [await rl_step(cell, batch, windows.take(PROMPT_TOKENS)) for batch in range(1 + TURNS)]
        await cell.trainer.save()
    finally:
        await cell.close()
    size = sum(len(cell.store.get(key)) for key in cell.store.list("checkpoints"))
    return costs[1:], float(size)  # the first step warms up


def _rows(adapters: Sequence[StepCost], whole: Sequence[StepCost]) -> list[Row]:
    measures: list[tuple[str, str, Callable[[StepCost], float]]] = [
        ("version", "bytes", lambda cost: cost.size_bytes),
        ("step_cpu_s", "s", lambda cost: cost.whole.cpu_seconds),
        ("training_cpu_s", "s", lambda cost: cost.training.cpu_seconds),
        ("sync_cpu_s", "s", lambda cost: cost.sync.cpu_seconds),
        ("step_s", "s", lambda cost: cost.whole.seconds),
    ]
    return [
        _row(name, unit, *(statistics.median(map(of, side)) for side in (adapters, whole)))
        for name, unit, of in measures
    ]


def _row(metric: str, unit: str, value: float, reference: float) -> Row:
    return Row("rank 16", metric, unit, value, "every weight", reference, reference / value)
