"""Rounds: publish, update the engine, sample whole groups, train, again. Pure: events in, actions out, time in the event.

One policy version samples a whole batch, so staleness is 0 and every trained token has the current version. The other
schedules are classes of their own with `on_event`, driven by the same loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from everlong.contracts.records import Purpose
from everlong.orchestrator.agenda import Agenda
from everlong.orchestrator.config import RoundsConfig
from everlong.orchestrator.episode_queue import EpisodeQueue, Group
from everlong.orchestrator.events import (
    Action,
    BatchDone,
    DropGroup,
    EngineUpdated,
    EpisodeEnded,
    EvalRecorded,
    Event,
    Publish,
    Published,
    Started,
    TrainGroups,
    UpdateEngine,
)
from everlong.orchestrator.progress import Progress


class RoundScheduler:
    def __init__(self, schedule: RoundsConfig, agenda: Agenda, progress: Progress) -> None:
        self._schedule, self._agenda, self._progress = schedule, agenda, progress
        self._queue = EpisodeQueue(
            max_running=schedule.max_running, max_failures=schedule.max_failures, progress=progress
        )
        self._round: list[int] = []
        self._evaluating = False
        self._num_replaced = progress.num_replaced
        self.deadlines = 0
        """How many deadlines the newest batch has met."""
        self._postponed = 0
        """Groups that the newest batch leaves to the next, since nothing of them had begun."""
        self.finished = False

    @property
    def wake_at_s(self) -> float | None:
        """When a `Tick` is wanted, on the clock of the events; None for never."""
        return self._queue.wake_at_s

    def on_event(self, event: Event) -> list[Action]:
        match event:
            case Started():
                return self._begin_batch()
            case BatchDone():
                self._agenda.batch = event.batch + 1
                self._num_replaced = 0
                return self._begin_batch()
            case Published():
                return [UpdateEngine(event.policy_version)]
            case EngineUpdated() | EvalRecorded():
                return self._next(event.now_s)
            case EpisodeEnded():
                self._queue.ended(event)
                return [*self._queue.fill(event.now_s), *self._close_if_complete()]
            case _:
                return self._check_deadline(event.now_s)

    def _begin_batch(self) -> list[Action]:
        warm_up = self._agenda.warm_up
        return [Publish() if warm_up is None else warm_up]

    def _next(self, now_s: float) -> list[Action]:
        """The engine holds the current version: evaluate if it is time, else open the next batch's groups."""
        if self._agenda.eval_due:
            self._evaluating = True
            self._agenda.open_eval(self._queue)
            return [*self._queue.fill(now_s), *self._close_if_complete()]
        if self._agenda.batch >= self._agenda.num_batches:
            self.finished = True
            return []
        return self._open_round(now_s)

    def _open_round(self, now_s: float) -> list[Action]:
        batch = self._agenda.batch
        closed = self._progress.closed_groups if batch == self._progress.num_batches else None
        if closed is not None:  # whoever is missing was masked when it closed
            self._agenda.take(closed)
            return [TrainGroups(batch, closed, save=self._agenda.saves(batch))]
        self.deadlines = self._postponed = 0
        self._open_groups(self._schedule.groups_per_batch)
        return [*self._queue.fill(now_s), *self._close_if_complete()]

    def _open_groups(self, count: int) -> None:
        """The whole round has the time of a batch from when the first member begins, those that are left of it as well."""
        for _ in range(count):
            group = self._agenda.next_group()
            self._round.append(group)
            self._agenda.open_train_group(self._queue, group, held=self._agenda.batch)
        if self._schedule.batch_deadline_s is not None:
            self._queue.set_deadline(Purpose.TRAIN, self._round, self._schedule.batch_deadline_s)

    def _close_if_complete(self) -> Sequence[Action]:
        queue = self._queue
        if queue.num_running or queue.num_waiting or queue.num_open(Purpose.TRAIN) or queue.num_open(Purpose.EVAL):
            return []
        if self._evaluating:
            self._evaluating = False
            return [self._agenda.close_eval(queue)]
        return self._close_round() if self._round else []

    def _close_round(self) -> list[Action]:
        groups, self._round = tuple(self._round), []
        for group in groups:
            self._queue.forget(Purpose.TRAIN, group)
        batch = self._agenda.batch
        return [
            TrainGroups(
                batch,
                groups,
                save=self._agenda.saves(batch),
                deadlines=self.deadlines,
                postponed=self._postponed,
            )
        ]

    def _check_deadline(self, now_s: float) -> list[Action]:
        if not self._queue.is_late(Purpose.TRAIN, now_s):
            return [*self._queue.cancel_late(now_s)]
        self.deadlines += 1
        open_groups = [group for group in self._queue.of(Purpose.TRAIN) if group.open]
        late = [group for group in open_groups if group.begun]
        if self._may_replace(late):
            return [*self._replace(late), *self._queue.fill(now_s), *self._close_if_complete()]
        self._postpone([group for group in open_groups if not group.begun])
        return [*self._queue.cancel_late(now_s)]

    def _may_replace(self, late: list[Group]) -> bool:
        """A batch replaces at most as many groups as it holds: where every group is late, it would never close."""
        room = self._schedule.groups_per_batch - self._num_replaced
        return self._schedule.on_deadline == "replace" and len(late) <= room

    def _replace(self, late: list[Group]) -> list[Action]:
        """Drop the groups that are late and open as many others; what their members sampled is discarded."""
        cancelled = self._queue.cancel_running({(group.purpose, group.number) for group in late})
        for group in late:
            self._queue.forget(group.purpose, group.number)
            self._round.remove(group.number)
        self._num_replaced += len(late)
        self._open_groups(len(late))
        return [*cancelled, *(DropGroup(group.number) for group in late)]

    def _postpone(self, groups: list[Group]) -> None:
        """Leave them to the next batch: nobody's time is over before it began."""
        for group in groups:
            self._queue.forget(group.purpose, group.number)
            self._round.remove(group.number)
            self._agenda.give_back(group.number)
        self._postponed += len(groups)
