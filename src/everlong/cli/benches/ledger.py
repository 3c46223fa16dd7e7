"""Durable facts per second: many writers that share a commit against one commit per fact."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from everlong.cli.bench import Row
from everlong.cli.benches.timing import interleaved
from everlong.contracts.records import Purpose
from everlong.ledger import EpisodeStarted, GroupOpened, Ledger, LedgerWriter, RunStarted, TurnSampled

NUM_FACTS = 200


def measure() -> list[Row]:
    rows = []
    for writers in (8, 64):
        shared, alone = interleaved(lambda n=writers: asyncio.run(_together(n)), _one_by_one, repeats=3)
        ours, reference = NUM_FACTS / shared, NUM_FACTS / alone
        rows.append(
            Row(f"{writers} writers", "facts_per_s", "1/s", ours, "one commit per fact", reference, ours / reference)
        )
    return rows


def _opened(folder: str) -> Ledger:
    ledger = Ledger.open(Path(folder) / "ledger.db")
    ledger.append(
        RunStarted(seed=0, config_hash="", tasks_hash=""),
        GroupOpened(purpose=Purpose.TRAIN, group=0, task="t", content_hash=""),
        EpisodeStarted(episode="e", group=0, attempt=0, purpose=Purpose.TRAIN, task="t", incarnation=0),
    )
    return ledger


def _fact(turn: int) -> TurnSampled:
    return TurnSampled(episode="e", incarnation=0, turn=turn, num_tokens=100)


async def _together(writers: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledger = _opened(folder)
        writer = LedgerWriter(ledger)

        async def write(first: int) -> None:
            for turn in range(first, NUM_FACTS, writers):
                await writer.append(_fact(turn))

        await asyncio.gather(*(write(first) for first in range(writers)))
        await writer.close()
        ledger.close()


def _one_by_one() -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledger = _opened(folder)
        for turn in range(NUM_FACTS):
            ledger.append(_fact(turn))
        ledger.close()
