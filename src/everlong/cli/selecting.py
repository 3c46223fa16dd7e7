"""Which episodes of a run somebody wants to see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from everlong.cli.reporting import kind_of
from everlong.contracts.records import Record
from everlong.ledger import EpisodeState, EpisodeView, Lifecycle

MAX_NAMED = 24
"""Of what exists, in a message."""


class Wanted(Record, frozen=True, kw_only=True):
    """Episodes that answer to all of it; an empty one wants them all.

    Example: Wanted(task="terminal/write-word", batch=3, reward=0.0)
    """

    task: str = ""
    """A task's id, what some begin with up to a slash, or a kind; empty for any."""
    batch: int | None = None
    """RL batch, counted from 1 as in the terminal."""
    reward: float | None = None
    failed: bool = False
    """Through no doing of the agent."""


def select_episodes(lifecycle: Lifecycle, wanted: Wanted, num_warmup: int) -> list[EpisodeView]:
    """In the order of their start. `num_warmup`: batches before the first RL batch.

    Raises ValueError for a task, batch or reward that no episode has, and names those that exist.
    """
    views = list(lifecycle.episodes.values())
    if wanted.task:
        views = _of_task(views, wanted.task)
    if wanted.batch is not None:
        views = _of_batch(lifecycle, views, wanted.batch, num_warmup)
    if wanted.reward is not None:
        views = _of_reward(lifecycle.episodes.values(), views, wanted.reward)
    return [view for view in views if not wanted.failed or view.state is EpisodeState.FAILED]


def _of_task(views: list[EpisodeView], task: str) -> list[EpisodeView]:
    start = task.rstrip("/") + "/"
    found = [view for view in views if view.task == task or view.task.startswith(start) or kind_of(view.task) == task]
    if not found:
        kinds = Counter(name.rpartition("/")[0] or name for name in {view.task for view in views})
        there = [f"{kind} ({count})" if count > 1 else kind for kind, count in sorted(kinds.items())]
        raise ValueError(f"no episode is of a task {task!r}: {_there(there)}")
    return found


def _of_batch(lifecycle: Lifecycle, views: list[EpisodeView], batch: int, num_warmup: int) -> list[EpisodeView]:
    known = [index + 1 - num_warmup for index, closed in sorted(lifecycle.batches.items()) if closed.groups]
    if batch not in known:
        there = f"there are {known[0]} to {known[-1]}" if known else "none is closed yet"
        raise ValueError(f"there is no RL batch {batch}: {there}")
    index = batch - 1 + num_warmup
    return [view for view in views if lifecycle.groups[view.purpose, view.group].batch == index]


def _of_reward(every: Iterable[EpisodeView], views: list[EpisodeView], reward: float) -> list[EpisodeView]:
    known = sorted({view.reward for view in every if view.reward is not None})
    if reward not in known:
        raise ValueError(f"no episode has the reward {reward:g}: {_there([f'{value:g}' for value in known])}")
    return [view for view in views if view.reward == reward]


def _there(names: list[str]) -> str:
    if not names:
        return "there is none yet"
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"there are {', '.join(names[:MAX_NAMED])}{more}"
