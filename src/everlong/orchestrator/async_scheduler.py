"""Overlap: the engine samples on while the trainer trains, and no token that trains is older than a bound. Pure.

A group is opened only if there is a batch left for it, behind the groups before it, at which its first token is still
young enough (the gate of AReaL, arXiv:2505.24298, by groups). So every task that is opened can be trained in time, and
what is trained has the mix of what was offered, however long an episode takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from everlong.contracts.records import Purpose
from everlong.orchestrator.agenda import Agenda
from everlong.orchestrator.config import AsyncConfig
from everlong.orchestrator.episode_queue import EpisodeQueue, Group
from everlong.orchestrator.events import (
    Action,
    BatchDone,
    EngineUpdated,
    EpisodeEnded,
    EvalRecorded,
    Event,
    Publish,
    Published,
    Started,
    Tick,
    TrainGroups,
    UpdateEngine,
)
from everlong.orchestrator.progress import Progress


def fits(oldest: Sequence[int], next_batch: int, groups_per_batch: int, max_staleness: int) -> bool:
    """Whether groups, trained in this order from batch `next_batch` on, are never beyond the bound.

    `oldest`: the version of each group's first token. Batch b trains on version b, so a token of version v is b - v old.
    """
    batches = (next_batch + place // groups_per_batch for place in range(len(oldest)))
    return all(batch - version <= max_staleness for batch, version in zip(batches, oldest, strict=True))


class AsyncScheduler:
    def __init__(self, schedule: AsyncConfig, agenda: Agenda, progress: Progress) -> None:
        self._schedule, self._agenda = schedule, agenda
        self._queue = EpisodeQueue(
            max_running=schedule.max_running, max_failures=schedule.max_failures, progress=progress
        )
        self._known, self._closed = dict(sorted(progress.open_groups.items())), progress.closed_groups
        agenda.take([*self._known, *(self._closed or ())])
        self._next_batch = agenda.batch
        """The next batch to close; one more than the batch under way while the trainer works on that."""
        self._training = self._publishing = self._updating = self._evaluating = False
        self._published = self._held = -1
        """The newest published version, and the one that the engine holds; -1 before the first."""
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
                return self._begin()
            case BatchDone():
                return self._batch_done(event)
            case Published():
                self._publishing, self._published = False, event.policy_version
            case EngineUpdated():
                self._updating, self._held = False, event.policy_version
            case EvalRecorded():
                self._evaluating = False
            case EpisodeEnded():
                self._queue.ended(event)
            case Tick():
                self.deadlines += self._queue.is_late(Purpose.TRAIN, event.now_s)
                return [*self._queue.cancel_late(event.now_s), *self._decide(event.now_s)]
        return self._decide(event.now_s)

    def _begin(self) -> list[Action]:
        warm_up = self._agenda.warm_up
        if warm_up is not None:
            self._training, self._next_batch = True, warm_up.batch + 1
            return [warm_up]
        self._publishing = True
        return [Publish()]

    def _batch_done(self, event: BatchDone) -> list[Action]:
        self._training, self._agenda.batch = False, event.batch + 1
        if self._agenda.index <= 0 or self._publication_due:
            return self._begin()
        return self._decide(event.now_s)

    @property
    def _publication_due(self) -> bool:
        agenda = self._agenda
        ends = agenda.batch == agenda.num_batches
        return ends or agenda.eval_due or agenda.index % self._schedule.publish_every == 0

    def _decide(self, now_s: float) -> list[Action]:
        """Whatever may begin now. The trainer rests while it publishes, so that what it publishes is what was asked for."""
        actions: list[Action] = []
        if self._published > self._held and not self._updating:
            self._updating = True
            actions.append(UpdateEngine(self._published))
        if self._held < 0:
            return actions
        self._open_known()
        if not self._training and not self._publishing:
            actions += self._evaluate() if self._agenda.eval_due else self._train()
        self._open_groups()
        return [*actions, *self._queue.fill(now_s)]

    def _evaluate(self) -> list[Action]:
        """One version answers a whole evaluation: the trainer rests meanwhile, and the training episodes go on."""
        if self._held < self._agenda.batch:
            return []
        if not self._evaluating:
            self._evaluating = True
            self._agenda.open_eval(self._queue)
        return [] if self._queue.num_open(Purpose.EVAL) else [self._agenda.close_eval(self._queue)]

    def _train(self) -> list[Action]:
        if self._next_batch >= self._agenda.num_batches:
            self.finished = not self._evaluating and self._held == self._agenda.batch
            return []
        groups = self._close_again() or self._choose()
        if not groups:
            return []
        batch, self._next_batch, self._training = self._next_batch, self._next_batch + 1, True
        deadlines, self.deadlines = self.deadlines, 0
        return [TrainGroups(batch, groups, save=self._agenda.saves(batch), deadlines=deadlines)]

    def _close_again(self) -> tuple[int, ...]:
        """The groups of a batch that was closed before a crash: whoever is missing was masked when it closed."""
        groups, self._closed = self._closed or (), None
        return groups

    def _choose(self) -> tuple[int, ...]:
        """The oldest complete groups, if there is a batch of them, and none that must wait would become too old by it."""
        size = self._schedule.groups_per_batch
        chosen = self._queue.complete(Purpose.TRAIN)[:size]
        if len(chosen) < size or not self._may_pass(chosen):
            return ()
        for group in chosen:
            self._queue.forget(Purpose.TRAIN, group.number)
        return tuple(group.number for group in chosen)

    def _may_pass(self, chosen: list[Group]) -> bool:
        """Nobody is passed by a batch of the oldest; else those that are must still fit behind it."""
        under_way = self._queue.of(Purpose.TRAIN)
        if self._schedule.on_over_age == "mask" or chosen == under_way[: len(chosen)]:
            return True
        return self._fits([group.oldest for group in under_way if group not in chosen], self._next_batch + 1)

    def _fits(self, oldest: Sequence[int], next_batch: int) -> bool:
        return fits(oldest, next_batch, self._schedule.groups_per_batch, self._schedule.max_staleness)

    def _open_known(self) -> None:
        """Those that an earlier process had opened; some may be complete, and nothing else would say so."""
        for group, oldest in self._known.items():
            self._open(group, oldest)
        self._known = {}

    def _open_groups(self) -> None:
        """As many as can still be trained young enough."""
        under_way = [group.oldest for group in self._queue.of(Purpose.TRAIN)]
        left = (self._agenda.num_batches - self._first_free) * self._schedule.groups_per_batch
        while len(under_way) < left and self._fits_last([*under_way, self._held]):
            under_way.append(self._held)
            self._open(self._agenda.next_group(), self._held)

    def _fits_last(self, oldest: list[int]) -> bool:
        """Of the newest alone: that older ones fit was seen when they were opened, and masking may have let them grow old."""
        place = (len(oldest) - 1) // self._schedule.groups_per_batch
        return self._fits(oldest[-1:], self._first_free + place)

    @property
    def _first_free(self) -> int:
        """The first batch that groups under way can be in."""
        return self._next_batch + (self._closed is not None)

    def _open(self, group: int, oldest: int) -> None:
        self._agenda.open_train_group(self._queue, group, held=self._held, oldest=oldest)
        if self._schedule.group_deadline_s is not None:
            self._queue.set_deadline(Purpose.TRAIN, (group,), self._schedule.group_deadline_s)
