"""Episodes that wait or run, and the groups they belong to: who is next, who is late, who is still to end. Pure.

Evaluations go before training, and within a purpose the oldest goes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from everlong.contracts.errors import Reason
from everlong.contracts.records import EpisodeOrder, Purpose
from everlong.orchestrator.events import CancelEpisode, EpisodeEnded, RunAborted, RunEpisode
from everlong.orchestrator.progress import Progress


@dataclass(slots=True)
class Group:
    """A group under way: who is still to end."""

    purpose: Purpose
    number: int
    task: str
    oldest: int
    """The engine's version when it was opened: none of its tokens is older."""
    open: set[int]
    """Attempts that have not ended."""
    deadline_s: float | None = None
    """When those that are still running are cancelled; None for never, or done."""


class EpisodeQueue:
    def __init__(self, *, max_running: int, max_failures: int, progress: Progress) -> None:
        self._max_running, self._max_failures, self._progress = max_running, max_failures, progress
        self._groups: dict[tuple[Purpose, int], Group] = {}
        self._waiting: dict[Purpose, deque[EpisodeOrder]] = {Purpose.EVAL: deque(), Purpose.TRAIN: deque()}
        self._running: dict[str, EpisodeOrder] = {}
        self._num_failures = 0

    # What there is

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return sum(len(orders) for orders in self._waiting.values())

    def of(self, purpose: Purpose) -> list[Group]:
        """The oldest first."""
        return sorted((g for g in self._groups.values() if g.purpose is purpose), key=lambda group: group.number)

    def complete(self, purpose: Purpose) -> list[Group]:
        """Groups of which every member has ended, the oldest first."""
        return [group for group in self.of(purpose) if not group.open]

    def num_open(self, purpose: Purpose) -> int:
        """Episodes that have not ended."""
        return sum(len(group.open) for group in self.of(purpose))

    @property
    def wake_at_s(self) -> float | None:
        """The earliest deadline of a group that still has somebody to wait for."""
        return min((g.deadline_s for g in self._groups.values() if g.deadline_s is not None and g.open), default=None)

    def late(self, now_s: float) -> list[Group]:
        """Groups whose deadline has passed and that still have somebody to wait for."""
        return [g for g in self._groups.values() if g.open and g.deadline_s is not None and g.deadline_s <= now_s]

    # What changes

    def open(
        self, purpose: Purpose, number: int, task: str, size: int, *, held: int, oldest: int | None = None
    ) -> None:
        """Queue the members that have not ended; they need an engine that holds version `held`."""
        orders = [
            EpisodeOrder(task=task, group=number, attempt=attempt, purpose=purpose, min_policy_version=held)
            for attempt in range(size)
        ]
        orders = [order for order in orders if order.episode not in self._progress.ended]
        attempts = {order.attempt for order in orders}
        self._groups[purpose, number] = Group(purpose, number, task, held if oldest is None else oldest, attempts)
        incarnations = self._progress.incarnations
        self._waiting[purpose] += [replace(o, incarnation=incarnations.get(o.episode, 0)) for o in orders]

    def set_deadline(self, purpose: Purpose, number: int, deadline_s: float | None) -> None:
        self._groups[purpose, number].deadline_s = deadline_s

    def forget(self, purpose: Purpose, number: int) -> Group:
        """Nobody waits for this group any more; those of its members that run still answer."""
        return self._groups.pop((purpose, number))

    def fill(self) -> list[RunEpisode]:
        """Begin as many as may run."""
        actions = []
        for waiting in self._waiting.values():
            while waiting and len(self._running) < self._max_running:
                actions.append(self._begin(waiting.popleft()))
        return actions

    def ended(self, event: EpisodeEnded) -> None:
        """Raises RunAborted after too many failures of ours in a row."""
        del self._running[event.order.episode]
        self._count_failure(event)
        group = self._groups.get((event.order.purpose, event.order.group))
        if group is not None:
            group.open.discard(event.order.attempt)

    def cancel_all(self) -> list[RunEpisode | CancelEpisode]:
        """Begin what waits, so that it ends and is accounted for, and cancel everything."""
        begun = [self._begin(order) for waiting in self._waiting.values() for order in _drained(waiting)]
        return [*begun, *self.cancel_running(self._running.values())]

    def cancel_late(self, now_s: float) -> list[RunEpisode | CancelEpisode]:
        """The same, of the groups whose deadline has passed."""
        late = self.late(now_s)
        keys = {(group.purpose, group.number) for group in late}
        for group in late:
            group.deadline_s = None
        begun = []
        for purpose, waiting in self._waiting.items():
            begun += [self._begin(order) for order in waiting if (purpose, order.group) in keys]
            self._waiting[purpose] = deque(order for order in waiting if (purpose, order.group) not in keys)
        running = [order for order in self._running.values() if (order.purpose, order.group) in keys]
        return [*begun, *self.cancel_running(running)]

    def drop_waiting(self) -> None:
        """Those that have not begun never will."""
        for waiting in self._waiting.values():
            waiting.clear()

    def cancel_running(self, orders: Iterable[EpisodeOrder] | None = None) -> list[CancelEpisode]:
        """All of them, or these."""
        orders = self._running.values() if orders is None else orders
        return [CancelEpisode(order.episode, Reason.DEADLINE) for order in orders]

    def _begin(self, order: EpisodeOrder) -> RunEpisode:
        self._running[order.episode] = order
        return RunEpisode(order)

    def _count_failure(self, event: EpisodeEnded) -> None:
        if event.reason in (Reason.CANCELLED, Reason.DEADLINE):
            return
        self._num_failures = 0 if event.reason.trustworthy else self._num_failures + 1
        if self._num_failures >= self._max_failures:
            raise RunAborted(
                f"{self._num_failures} episodes in a row failed through no doing of the agent; the last, "
                f"{event.order.episode}, with {event.reason}:\n{event.error}"
            )


def _drained(waiting: deque[EpisodeOrder]) -> list[EpisodeOrder]:
    orders = list(waiting)
    waiting.clear()
    return orders
