"""One RL step and one version through adapters of rank 16 against training every weight: SmolLM2-135M, bfloat16.

A step is that of the bench `step`: a group of 8 answers of 64 tokens to a prompt of 128, one gradient, one update, published
and loaded. Adapters take ten times the learning rate of the whole, as they commonly need. `version` is a delta, whose size
hangs on the learning rate; `anchor` the same published whole, as every tenth is. One side after the other, since both at
once need 9 GB: trust the processor's time.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence

from everlong.cli.bench import Row
from everlong.cli.benches.prompts import Windows
from everlong.cli.benches.smollm2 import SmolCell, open_smollm2
from everlong.cli.benches.step import PROMPT_TOKENS, StepCost, rl_step
from everlong.engines.config import EmbeddedConfig
from everlong.models.adapter_config import LoraConfig
from everlong.storage import open_store
from everlong.weights import WeightPublisher, WeightReader

TURNS = 2
RATE = 1e-5
"""Of the whole; adapters take ten times as much."""


def measure() -> list[Row]:
    return asyncio.run(_measure())


async def _measure() -> list[Row]:
    adapters, adapter_bytes = await _side(LoraConfig(rank=16), 10 * RATE)
    whole, whole_bytes = await _side(None, RATE)
    sizes = [_row(name, "bytes", adapter_bytes[name], whole_bytes[name]) for name in adapter_bytes]
    return [*_rows(adapters, whole), *sizes]


async def _side(adapter: LoraConfig | None, learning_rate: float) -> tuple[list[StepCost], dict[str, float]]:
    """What the steps of one side cost, and the bytes of its anchors and checkpoints."""
    cell = await open_smollm2(EmbeddedConfig(), adapter, learning_rate)
    windows = Windows(cell.tokenizer)
    try:
        costs = [await rl_step(cell, batch, windows.take(PROMPT_TOKENS)) for batch in range(1 + TURNS)]
        await cell.trainer.save()
    finally:
        await cell.close()
    checkpoint = sum(len(cell.store.get(key)) for key in cell.store.list("checkpoints"))
    sizes = {"anchor": float(anchor_bytes(cell)), "checkpoint": float(checkpoint)}
    return costs[1:], sizes  # the first step warms up


def anchor_bytes(cell: SmolCell) -> int:
    """Of the newest version, published whole."""
    reader = WeightReader(cell.store)
    newest = reader.read(reader.versions()[-1])
    return WeightPublisher(open_store("memory://"), anchor_every=1).publish(newest, None).size_bytes


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
