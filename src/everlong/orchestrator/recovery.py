"""What a resumed run does first, read from the ledger: a pure view of the past, and the few facts that close it.

Nothing else is saved about progress. An episode that had started and not ended is interrupted: what it sampled is
discarded, and the same attempt starts again in its next incarnation, with the same random numbers.
"""

from __future__ import annotations

from everlong.contracts.records import Purpose
from everlong.ledger.facts import EpisodeInterrupted, Fact
from everlong.ledger.lifecycle import Lifecycle
from everlong.orchestrator.scheduler import Progress


def interruptions(lifecycle: Lifecycle) -> list[Fact]:
    """One fact per episode that was under way when the run stopped."""
    return [
        EpisodeInterrupted(episode=name, incarnation=state.incarnation)
        for name, state in sorted(lifecycle.episodes.items())
        if state.running
    ]


def progress_of(lifecycle: Lifecycle) -> Progress:
    """Where the run stands. Call it after the interruptions are recorded."""
    trained = [record for record in lifecycle.batches if record.trained]
    closed = [record for record in lifecycle.batches if not record.trained]
    dropped = {number for (purpose, number), g in lifecycle.groups.items() if purpose is Purpose.TRAIN and g.dropped}
    return Progress(
        num_batches=len(trained),
        consumed=frozenset(dropped.union(*(record.groups for record in trained))),
        closed_groups=tuple(closed[0].groups) if closed else None,
        ended=frozenset(name for name, state in lifecycle.episodes.items() if state.finished),
        incarnations={name: s.incarnation + 1 for name, s in lifecycle.episodes.items() if s.interrupted},
        evals=frozenset(lifecycle.evals),
    )
