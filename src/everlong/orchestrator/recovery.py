"""What a resumed run reads from the ledger: where it stands, and which episodes a crash left without an end. Pure.

Nothing else is saved about progress. An episode that had started and not ended is interrupted: what it sampled is
discarded, and the same attempt starts again in its next incarnation, with the same random numbers.
"""

from __future__ import annotations

import msgspec

from everlong.contracts.records import Purpose
from everlong.ledger.facts import EpisodeInterrupted, EpisodeState, Fact
from everlong.ledger.lifecycle import GroupView, Lifecycle
from everlong.orchestrator.outcomes import replaced_outcome
from everlong.orchestrator.progress import Progress


def interruptions(lifecycle: Lifecycle) -> list[Fact]:
    """Facts that close what was under way when the run stopped; members of a replaced group end with it."""
    facts: list[Fact] = []
    for view in lifecycle.open_episodes():
        if view.state is EpisodeState.RUNNING:
            facts.append(EpisodeInterrupted(episode=view.episode, incarnation=view.incarnation))
        if _replaced(lifecycle, lifecycle.groups[view.purpose, view.group]):
            lost = view.state is not EpisodeState.FINISHED  # an interruption has accounted for its tokens
            nothing = msgspec.structs.replace(view, turn_tokens=0, stray_tokens={})
            facts.append(replaced_outcome(nothing if lost else view))
    return facts


def progress_of(lifecycle: Lifecycle) -> Progress:
    """Where the run stands. Call it after the interruptions are recorded."""
    groups = [view for (purpose, _), view in lifecycle.groups.items() if purpose is Purpose.TRAIN]
    replaced = {view.group for view in groups if _replaced(lifecycle, view)}
    newest = max((view.group for view in groups if view.batch is not None), default=-1)
    closed = lifecycle.batches.get(lifecycle.num_trained)
    trained = {v.group for v in groups if v.batch is not None and v.batch < lifecycle.num_trained}
    return Progress(
        num_batches=lifecycle.num_trained,
        consumed=frozenset(trained | replaced),
        closed_groups=closed.groups if closed is not None and closed.groups else None,
        open_groups={
            view.group: view.engine_version for view in groups if view.batch is None and view.group not in replaced
        },
        ended=frozenset(
            name
            for name, view in lifecycle.episodes.items()
            if view.state not in (EpisodeState.RUNNING, EpisodeState.INTERRUPTED)
        ),
        incarnations={
            name: view.incarnation + 1
            for name, view in lifecycle.episodes.items()
            if view.state is EpisodeState.INTERRUPTED
        },
        evals=frozenset(lifecycle.evals),
        # who takes the place of a group has a higher number: what a closed batch replaced lies below its own groups
        num_replaced=sum(group > newest for group in replaced),
    )


def _replaced(lifecycle: Lifecycle, group: GroupView) -> bool:
    """A training group of which a member ended although no batch holds the group."""
    if group.purpose is not Purpose.TRAIN or group.batch is not None:
        return False
    return any(lifecycle.episodes[name].state.terminal for name in group.episodes)
