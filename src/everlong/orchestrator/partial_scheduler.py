"""Partial rollout: sampling pauses when enough episodes have ended, whole groups train, the others go on. Pure.

N x K episodes are alive (N groups of K). When ceil(completion N K) have ended since the last pause and at least one group
is complete, sampling pauses; the complete groups train, the engine gets the new weights, and the episodes that had not
ended go on first, their further tokens with the new version; new groups fill the places that became free. The last batch
waits for everybody. Kimi K3's synchronous partial rollout.
"""

from __future__ import annotations

import math

from everlong.contracts.records import Purpose
from everlong.orchestrator.agenda import Agenda
from everlong.orchestrator.config import PartialConfig
from everlong.orchestrator.episode_queue import EpisodeQueue
from everlong.orchestrator.events import (
    Action,
    BatchDone,
    EngineUpdated,
    EpisodeEnded,
    EvalRecorded,
    Event,
    PauseSampling,
    Publish,
    Published,
    ResumeSampling,
    Started,
    Tick,
    TrainGroups,
    UpdateEngine,
)
from everlong.orchestrator.progress import Progress


class PartialScheduler:
    def __init__(self, schedule: PartialConfig, agenda: Agenda, progress: Progress) -> None:
        self._schedule, self._agenda = schedule, agenda
        self._alive = schedule.groups_per_batch * schedule.group_size
        self._queue = EpisodeQueue(
            max_running=min(schedule.max_running, self._alive), max_failures=schedule.max_failures, progress=progress
        )
        self._known, self._closed = dict(sorted(progress.open_groups.items())), progress.closed_groups
        agenda.take([*self._known, *(self._closed or ())])
        self._num_ended = 0
        """Training episodes since the last pause."""
        self._evaluating, self._sampling = False, False
        """Whether an evaluation is under way; whether a round is, which may pause."""
        self.deadlines = 0
        """Deadlines of training groups that were met since a batch was closed."""
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
                return self._begin_batch()
            case Published():
                return [UpdateEngine(event.policy_version)]
            case EngineUpdated():
                self._queue.resume()
                return [ResumeSampling(), *self._next(event.now_s)]
            case EvalRecorded():
                return self._next(event.now_s)
            case EpisodeEnded():
                self._queue.ended(event)
                self._num_ended += event.order.purpose is Purpose.TRAIN
            case Tick():
                self.deadlines += self._queue.is_late(Purpose.TRAIN, event.now_s)
                return [*self._queue.cancel_late(event.now_s), *self._close_if_due(event.now_s)]
        return [*self._queue.fill(event.now_s), *self._close_if_due(event.now_s)]

    def _begin_batch(self) -> list[Action]:
        warm_up = self._agenda.warm_up
        return [Publish() if warm_up is None else warm_up]

    def _next(self, now_s: float) -> list[Action]:
        """The engine holds the current version: evaluate if it is time, beside who was alive; else sample the next batch."""
        agenda = self._agenda
        if agenda.eval_due:
            self._evaluating = True
            agenda.open_eval(self._queue)
        elif agenda.batch >= agenda.num_batches:
            self.finished = True
            return []
        elif self._closed is not None:  # before a crash: whoever is missing was masked when it closed
            groups, self._closed = self._closed, None
            self._queue.pause(now_s)
            return [PauseSampling(), TrainGroups(agenda.batch, groups, save=agenda.saves(agenda.batch))]
        else:
            self._open_groups()
            self._sampling = True
        return [*self._queue.fill(now_s), *self._close_if_due(now_s)]

    def _open_groups(self) -> None:
        """Those that an earlier process had opened, then new ones until every place is taken."""
        for group, oldest in self._known.items():
            self._open(group, oldest)
        self._known = {}
        while self._queue.num_open(Purpose.TRAIN) < self._alive:
            self._open(self._agenda.next_group(), self._agenda.batch)

    def _open(self, group: int, oldest: int) -> None:
        self._agenda.open_train_group(self._queue, group, held=self._agenda.batch, oldest=oldest)
        if self._schedule.group_deadline_s is not None:
            self._queue.set_deadline(Purpose.TRAIN, (group,), self._schedule.group_deadline_s)

    def _close_if_due(self, now_s: float) -> list[Action]:
        if self._evaluating and not self._queue.num_open(Purpose.EVAL):
            self._evaluating = False
            return [self._agenda.close_eval(self._queue)]
        if not self._sampling or not self._enough:
            return []
        groups = tuple(group.number for group in self._queue.complete(Purpose.TRAIN))
        for group in groups:
            self._queue.forget(Purpose.TRAIN, group)
        self._sampling, self._num_ended = False, 0
        self._queue.pause(now_s)
        deadlines, self.deadlines = self.deadlines, 0
        batch = self._agenda.batch
        train = TrainGroups(batch, groups, save=self._agenda.saves(batch), deadlines=deadlines)
        return [PauseSampling(), train]

    @property
    def _enough(self) -> bool:
        """A group must be complete, since a batch of none teaches nothing; the last batch leaves nobody behind."""
        if self._agenda.batch == self._agenda.num_batches - 1:
            return not self._queue.num_open(Purpose.TRAIN)
        share = math.ceil(round(self._schedule.completion * self._alive, 9))  # 0.07 * 100 is a hair above 7
        return self._num_ended >= share and bool(self._queue.complete(Purpose.TRAIN))
