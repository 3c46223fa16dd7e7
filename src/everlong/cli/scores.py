"""How well the episodes of an evaluation went: success with its interval, over all tasks and by their kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everlong.contracts.records import Episode, Record
from everlong.environments.tasks.sources import TaskSet
from everlong.observe import success_text, wilson_interval


class Score(Record, frozen=True, kw_only=True):
    """Example: Score(tasks=2, episodes=3, without_verdict=1, success=2 / 3, interval=(0.2, 0.94), reward=2 / 3)"""

    tasks: int
    episodes: int
    """With a verdict: all that the shares are of."""
    without_verdict: int
    success: float | None
    """Share with a reward of 1 or more; None where there is no verdict."""
    interval: tuple[float, float] | None
    """Of the success, 95 % (Wilson 1927); attempts at one task are more alike than it supposes."""
    reward: float | None
    """Mean."""

    @property
    def text(self) -> str:
        return "no verdict" if self.success is None else success_text(self.success, self.episodes)


class Scores(Record, frozen=True, kw_only=True):
    total: Score
    kinds: dict[str, Score]
    """By name; empty where no task says its kind, "other" holds those that do not."""
    has_other_rewards: bool
    """Than 0 and 1, so that the mean reward says more than the success."""


def scores_of(episodes: Sequence[Episode], tasks: TaskSet) -> Scores:
    by_kind: dict[str, list[Episode]] = {}
    kind = {task.id: task.task.kind for task in tasks}
    for episode in episodes:
        by_kind.setdefault(kind[episode.order.task] or "other", []).append(episode)
    named = sorted(by_kind) if any(kind.values()) else []
    return Scores(
        total=_score(episodes),
        kinds={name: _score(by_kind[name]) for name in named},
        has_other_rewards=any(episode.reward not in (None, 0.0, 1.0) for episode in episodes),
    )


def score_rows(scores: Scores) -> list[list[str]]:
    """A header, a row per kind and one for all of them."""
    named: Mapping[str, Score] = {**scores.kinds, "all": scores.total}
    rows = [["kind", "tasks", "episodes", "success (95 %)"]]
    rows += [[name, str(each.tasks), str(each.episodes), each.text] for name, each in named.items()]
    if scores.has_other_rewards:
        means = ["–" if each.reward is None else f"{each.reward:.3f}" for each in named.values()]
        rows = [[*row, mean] for row, mean in zip(rows, ["mean reward", *means], strict=True)]
    return rows


def _score(episodes: Sequence[Episode]) -> Score:
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    successes, count = sum(reward >= 1.0 for reward in rewards), len(rewards)
    return Score(
        tasks=len({episode.order.task for episode in episodes}),
        episodes=count,
        without_verdict=len(episodes) - count,
        success=successes / count if count else None,
        interval=wilson_interval(successes, count) if count else None,
        reward=sum(rewards) / count if count else None,
    )
