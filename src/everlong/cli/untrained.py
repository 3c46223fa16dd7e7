"""A run that ended and whose RL batches taught nothing: that it did, why, and what to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from everlong.cli.config import RunConfig
from everlong.contracts.errors import Reason
from everlong.contracts.records import Purpose
from everlong.ledger import EpisodeView, Lifecycle
from everlong.models.config import ScriptedModel
from everlong.orchestrator.config import RoundsConfig

TAUGHT_NOTHING = 3
"""Exit code of a run that ended without one trained token, in RL and before, although its model trains."""


def num_rl_batches(lifecycle: Lifecycle) -> int:
    """Of those that were trained."""
    return sum(bool(batch.groups) for batch in lifecycle.batches.values() if batch.policy_version is not None)


def untrained_lines(config: RunConfig, num_batches: int, views: Iterable[EpisodeView], run: Path) -> list[str]:
    """What happened in so many RL batches instead, and what to do; empty where a token was trained, or nothing was tried."""
    views = [view for view in views if view.purpose is Purpose.TRAIN]
    if not num_batches or any(view.trained for view in views):
        return []
    reasons = Counter(view.reason for view in views if view.reason).most_common()
    batches = "its one RL batch" if num_batches == 1 else f"all {num_batches} RL batches"
    ended = ", ".join(f"{reason} {count}" for reason, count in reasons)
    lines = [f"not one token was trained in {batches}: the weights are those from before RL"]
    if ended:
        lines += [f"  its {len(views)} episodes ended as: {ended}", f"  {_advice(reasons[0][0], config, run)}"]
    return lines


def taught_nothing(config: RunConfig, lines: list[str]) -> bool:
    """Whether the run was for nothing: no batch trained, the warm-up's neither. `lines` are `untrained_lines`."""
    return bool(lines) and not config.warmup.num_batches and not isinstance(config.model, ScriptedModel)


def _advice(reason: str, config: RunConfig, run: Path) -> str:
    """What to do about what happened most."""
    deadline = "batch_deadline_s" if isinstance(config.schedule, RoundsConfig) else "group_deadline_s"
    match reason:
        case Reason.DEADLINE:
            return f"give more time (schedule.{deadline}), or the agent less to do in it (harness.max_turns)"
        case Reason.NEVER_BEGAN:
            return f"give more slots (schedule.max_running) or more time (schedule.{deadline})"
        case "zero_signal":
            return (
                "the attempts at each task got the same reward: begin with a warm-up (warmup.num_batches), take easier or harder "
                "tasks, or make more attempts (schedule.group_size)"
            )
        case "over_age":
            return "every token was too old: raise schedule.max_staleness"
    return f"see what the episodes say of it: everlong view {run} EPISODE"
