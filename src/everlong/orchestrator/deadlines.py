"""How long groups may take, counted only while they can go on. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from everlong.contracts.records import Purpose

Key = tuple[Purpose, int]
"""Of a group."""


@dataclass(slots=True)
class Deadline:
    """The time that some groups of one purpose have together."""

    groups: set[Key]
    left_s: float
    """As of `since_s`, or while it stands still."""
    since_s: float | None = None
    """Since when its clock runs; None while it stands still."""

    @property
    def at_s(self) -> float | None:
        """When it passes if nothing stops the clock; None while that stands still."""
        return None if self.since_s is None else self.since_s + self.left_s

    def turn(self, runs: bool, now_s: float) -> None:
        """Start or stop the clock."""
        if runs and self.since_s is None:
            self.since_s = now_s
        elif not runs and self.since_s is not None:
            self.left_s -= now_s - self.since_s
            self.since_s = None


class Deadlines:
    """A clock runs while an episode of its groups runs, and stands still while the other purpose holds back those that wait.

    Training holds an evaluation back while it holds slots that the evaluation waits for; then training's clocks run. The
    evaluation holds a training group back, whose members wait, while its own episodes run and none of them waits. So of two that
    wait for each other one always has a clock that runs.
    """

    def __init__(self) -> None:
        self._all: list[Deadline] = []
        self.paused = False
        """While sampling is paused every clock stands still."""

    @property
    def next_at_s(self) -> float | None:
        """When the first passes."""
        return min((at_s for each in self._all if (at_s := each.at_s) is not None), default=None)

    def give(self, groups: Iterable[Key], within_s: float) -> None:
        """These groups have so much time together, and no other deadline any more."""
        groups = set(groups)
        self.drop(groups)
        self._all.append(Deadline(groups, within_s))

    def drop(self, groups: set[Key]) -> None:
        for each in self._all:
            each.groups -= groups
        self._all = [each for each in self._all if each.groups]

    def late(self, now_s: float) -> set[Key]:
        """Groups whose deadline has passed."""
        late = [each for each in self._all if (at_s := each.at_s) is not None and at_s <= now_s]
        return set().union(*(each.groups for each in late))

    def turn(self, running: set[Key], waiting: set[Key], now_s: float) -> None:
        """`running`, `waiting`: groups of which an episode does."""
        trains = any(purpose is Purpose.TRAIN for purpose, _ in running)
        eval_waits = any(purpose is Purpose.EVAL for purpose, _ in waiting)
        eval_goes = not eval_waits and any(purpose is Purpose.EVAL for purpose, _ in running)
        hinders = {Purpose.EVAL: trains, Purpose.TRAIN: eval_goes}
        for each in self._all:
            held_back = any(hinders[purpose] for purpose, _ in each.groups & waiting)
            each.turn(not self.paused and not held_back and bool(each.groups & running), now_s)
