"""One RL step and one version through adapters of rank 16 against training every weight: SmolLM2-135M, bfloat16.

A step is that of the bench `step`: a group of 8 answers of 64 tokens to a prompt of 128, one gradient, one update, published
and loaded. Adapters take ten times the learning rate of the whole, as they commonly need. Bytes are those of a version after
the first, which is a delta; how large it is hangs on the learning rate.
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

TURNS = 3
RATE = 1e-5
"""Of the whole; adapters take ten times as much."""


def measure() -> list[Row]:
    return asyncio.run(_measure())


async def _measure() -> list[Row]:
    adapters = await open_smollm2(EmbeddedConfig(), LoraConfig(rank=16), 10 * RATE)
    whole = await open_smollm2(EmbeddedConfig(), learning_rate=RATE)
    sides, windows = (adapters, whole), Windows(whole.tokenizer)
    costs: tuple[list[StepCost], list[StepCost]] = ([], [])
    try:
        for batch in range(1 + TURNS):
            prompt = windows.take(PROMPT_TOKENS)
            for side, kept in zip(sides, costs, strict=True):
                kept.append(await rl_step(side, batch, prompt))
        for side in sides:
            await side.trainer.save()
    finally:
        for side in sides:
            await side.close()
    # the first turn warms both up
    return [
        *_rows(costs[0][1:], costs[1][1:]),
        _row("checkpoint", "bytes", *(_checkpoint_bytes(side) for side in sides)),
    ]


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


def _checkpoint_bytes(cell: SmolCell) -> float:
    return float(sum(len(cell.store.get(key)) for key in cell.store.list("checkpoints")))
