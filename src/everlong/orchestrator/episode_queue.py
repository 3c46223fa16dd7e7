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
from everlong.orchestrator.deadlines import Deadlines, Key
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
    begun: bool
    """Whether one of them began, in this process or before a crash."""


class EpisodeQueue:
    def __init__(self, *, max_running: int, max_failures: int, progress: Progress) -> None:
        self._max_running, self._max_failures, self._progress = max_running, max_failures, progress
        self._groups: dict[Key, Group] = {}
        self._waiting: dict[Purpose, deque[EpisodeOrder]] = {Purpose.EVAL: deque(), Purpose.TRAIN: deque()}
        self._running: dict[str, EpisodeOrder] = {}
        self._deadlines = Deadlines()
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
        """When the next deadline passes, if nothing happens until then."""
        return self._deadlines.next_at_s

    def is_late(self, purpose: Purpose, now_s: float) -> bool:
        """Whether a deadline of groups of that purpose has passed."""
        return any(key[0] is purpose for key in self._deadlines.late(now_s))

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
        incarnations = self._progress.incarnations
        begun = len(attempts) < size or any(order.episode in incarnations for order in orders)
        oldest = held if oldest is None else oldest
        self._groups[purpose, number] = Group(purpose, number, task, oldest, attempts, begun)
        self._waiting[purpose] += [replace(o, incarnation=incarnations.get(o.episode, 0)) for o in orders]

    def set_deadline(self, purpose: Purpose, numbers: Iterable[int], within_s: float) -> None:
        """These groups have so much time together, counted from when the first of their members begins."""
        self._deadlines.give(((purpose, number) for number in numbers), within_s)

    def forget(self, purpose: Purpose, number: int) -> Group:
        """Nobody waits for this group any more: members that have not begun never will, those that run still answer."""
        key = purpose, number
        self._deadlines.drop({key})
        self._waiting[purpose] = deque(order for order in self._waiting[purpose] if order.group != number)
        return self._groups.pop(key)

    def fill(self, now_s: float) -> list[RunEpisode]:
        """Begin as many as may run."""
        actions = []
        for waiting in self._waiting.values():
            while waiting and len(self._running) < self._max_running:
                actions.append(self._begin(waiting.popleft()))
        self._turn_clocks(now_s)
        return actions

    def pause(self, now_s: float) -> None:
        """Sampling stands still, and with it every clock."""
        self._deadlines.paused = True
        self._turn_clocks(now_s)

    def resume(self) -> None:
        """Clocks run again with the next `fill`."""
        self._deadlines.paused = False

    def ended(self, event: EpisodeEnded) -> None:
        """Raises RunAborted after too many failures of ours in a row."""
        del self._running[event.order.episode]
        self._count_failure(event)
        group = self._groups.get((event.order.purpose, event.order.group))
        if group is not None:
            group.open.discard(event.order.attempt)

    def cancel_late(self, now_s: float) -> list[RunEpisode | CancelEpisode]:
        """Cancel the members of the groups whose deadline has passed. Those that wait begin for it, so that they end and are
        accounted for, by a reason of their own."""
        late = self._deadlines.late(now_s)
        self._deadlines.drop(late)
        running = self.cancel_running(late)
        actions: list[RunEpisode | CancelEpisode] = []
        for purpose, waiting in self._waiting.items():
            for order in [order for order in waiting if (purpose, order.group) in late]:
                actions += [self._begin(order), CancelEpisode(order.episode, Reason.NEVER_BEGAN)]
            self._waiting[purpose] = deque(order for order in waiting if (purpose, order.group) not in late)
        self._turn_clocks(now_s)
        return [*actions, *running]

    def cancel_running(self, groups: set[Key]) -> list[CancelEpisode]:
        """The members that run, of these groups."""
        orders = [order for order in self._running.values() if (order.purpose, order.group) in groups]
        return [CancelEpisode(order.episode, Reason.DEADLINE) for order in orders]

    def _turn_clocks(self, now_s: float) -> None:
        running = {(order.purpose, order.group) for order in self._running.values()}
        waiting = {(purpose, order.group) for purpose, orders in self._waiting.items() for order in orders}
        self._deadlines.turn(running, waiting, now_s)

    def _begin(self, order: EpisodeOrder) -> RunEpisode:
        self._running[order.episode] = order
        self._groups[order.purpose, order.group].begun = True
        return RunEpisode(order)

    def _count_failure(self, event: EpisodeEnded) -> None:
        if event.reason.ordered:
            return
        self._num_failures = 0 if event.reason.trustworthy else self._num_failures + 1
        if self._num_failures >= self._max_failures:
            raise RunAborted(
                f"{self._num_failures} episodes in a row failed through no doing of the agent; the last, "
                f"{event.order.episode}, with {event.reason}:\n{event.error}"
            )
