"""Rounds: publish, update the engine, sample whole groups, train, again. Pure: events in, actions out, time in the event.

One policy version samples a whole batch, so staleness is 0 and every trained token has the current version. Another
schedule (overlapping, partial rollouts) is another class with `on_event`, not another loop.

Evaluations stand between batches: before the first RL batch, every `eval_every`, and after the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from everlong.contracts.errors import Reason
from everlong.contracts.records import EpisodeOrder, Purpose
from everlong.orchestrator.config import ScheduleConfig, WarmupConfig
from everlong.orchestrator.cursor import task_of_group
from everlong.orchestrator.events import (
    Action,
    BatchDone,
    CancelEpisode,
    DropGroup,
    EngineUpdated,
    EpisodeEnded,
    EvalRecorded,
    Event,
    Publish,
    Published,
    RecordEval,
    RunAborted,
    RunEpisode,
    Started,
    TrainGroups,
    UpdateEngine,
    WarmUp,
)


@dataclass(slots=True)
class Group:
    """A group under way: who is still to end."""

    purpose: Purpose
    number: int
    task: str
    open: set[int]
    """Attempts that have not ended."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What an earlier process of the same run already did, as the ledger tells it."""

    num_batches: int = 0
    """Trained batches, warm-up included; equals the policy version."""
    consumed: frozenset[int] = frozenset()
    """Training groups that a trained batch holds or that were replaced. Every other group is still to be served."""
    closed_groups: tuple[int, ...] | None = None
    """Groups of a batch that was closed but not trained: it closes over the same groups again."""
    ended: frozenset[str] = frozenset()
    """Episodes that ended and whose content is stored: they are not sampled again."""
    incarnations: dict[str, int] = field(default_factory=dict)
    """Next incarnation of every episode that was interrupted."""
    evals: frozenset[int] = frozenset()
    """Evaluations already recorded."""
    num_replaced: int = 0
    """Groups that the batch under way has replaced already."""


def is_checkpoint_due(batch: int, schedule: ScheduleConfig, warmup: WarmupConfig) -> bool:
    """Whether a checkpoint follows batch `batch`: at the interval, and at the end of the warm-up and of the run."""
    done = batch + 1
    ends_phase = done in (warmup.num_batches, warmup.num_batches + schedule.num_batches)
    return ends_phase or done % schedule.checkpoint_every == 0


class RoundScheduler:
    def __init__(
        self,
        schedule: ScheduleConfig,
        warmup: WarmupConfig,
        *,
        train_tasks: Sequence[str],
        eval_tasks: Sequence[str],
        seed: int,
        progress: Progress | None = None,
    ) -> None:
        if schedule.num_batches and not train_tasks:
            raise ValueError("there are batches to train but no training tasks: give tasks.train a folder with tasks")
        self._schedule, self._warmup, self._seed = schedule, warmup, seed
        self._train_tasks, self._eval_tasks = list(train_tasks), list(eval_tasks)
        self._progress = progress or Progress()
        self._batch = self._progress.num_batches
        self._taken = set(self._progress.consumed)
        self._next_group = 0
        self._groups: dict[tuple[Purpose, int], Group] = {}
        self._round: list[int] = []
        self._waiting: deque[EpisodeOrder] = deque()
        self._running: dict[str, EpisodeOrder] = {}
        self._evals = set(self._progress.evals)
        self._eval: int | None = None
        self._deadline_s: float | None = None
        self._failures = 0
        self._num_replaced = self._progress.num_replaced
        self.deadlines = 0
        """How many deadlines the newest batch has met."""
        self.finished = False

    @property
    def num_batches(self) -> int:
        """All batches of the run, warm-up included."""
        return self._warmup.num_batches + self._schedule.num_batches

    @property
    def batch(self) -> int:
        """The batch under way: batches before it are trained."""
        return self._batch

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def wake_at_s(self) -> float | None:
        """When a `Tick` is wanted, on the clock of the events; None for never."""
        return self._deadline_s

    def on_event(self, event: Event) -> list[Action]:
        match event:
            case Started():
                return self._begin()
            case BatchDone():
                self._batch = event.batch + 1
                self._num_replaced = 0
                return self._begin_warm() if self._batch < self._warmup.num_batches else [Publish()]
            case Published():
                return [UpdateEngine(event.policy_version)]
            case EngineUpdated() | EvalRecorded():
                return self._next(event.now_s)
            case EpisodeEnded():
                return self._episode_ended(event)
            case _:
                return self._check_deadline(event.now_s)

    def _begin(self) -> list[Action]:
        warm = self._batch < self._warmup.num_batches
        return self._begin_warm() if warm else [Publish()]

    def _begin_warm(self) -> list[Action]:
        return [WarmUp(self._batch, save=self._saves(self._batch))]

    def _saves(self, batch: int) -> bool:
        return is_checkpoint_due(batch, self._schedule, self._warmup)

    def _next(self, now_s: float) -> list[Action]:
        """The engine holds the current version: evaluate if it is time, else open the next batch's groups."""
        index = self._batch - self._warmup.num_batches
        if self._eval_due(index):
            return self._open_eval(index, now_s)
        if self._batch >= self.num_batches:
            self.finished = True
            return []
        return self._open_round(now_s)

    def _eval_due(self, index: int) -> bool:
        every = self._schedule.eval_every
        due = index == 0 or self._batch == self.num_batches or bool(every and index % every == 0)
        return due and bool(self._eval_tasks) and index not in self._evals

    def _open_eval(self, index: int, now_s: float) -> list[Action]:
        self._eval = index
        if self._schedule.eval_deadline_s is not None:
            self._deadline_s = now_s + self._schedule.eval_deadline_s
        first = index * len(self._eval_tasks)
        for place, task in enumerate(self._eval_tasks):
            self._open_group(Purpose.EVAL, first + place, task, self._schedule.eval_attempts)
        return self._fill() or self._close_if_complete()

    def _open_round(self, now_s: float) -> list[Action]:
        closed = self._progress.closed_groups if self._batch == self._progress.num_batches else None
        if closed is not None:  # whoever is missing was masked when it closed
            self._taken.update(closed)
            return [TrainGroups(self._batch, closed, save=self._saves(self._batch))]
        if self._schedule.batch_deadline_s is not None:
            self._deadline_s = now_s + self._schedule.batch_deadline_s
        self.deadlines = 0
        self._round = self._take_groups(self._schedule.groups_per_batch)
        for group in self._round:
            self._open_train_group(group)
        return self._fill() or self._close_if_complete()

    def _take_groups(self, count: int) -> list[int]:
        """The next groups in order that nobody consumed."""
        groups: list[int] = []
        while len(groups) < count:
            if self._next_group not in self._taken:
                groups.append(self._next_group)
            self._next_group += 1
        return groups

    def _open_train_group(self, group: int) -> None:
        task = self._train_tasks[task_of_group(group, len(self._train_tasks), self._seed)]
        self._open_group(Purpose.TRAIN, group, task, self._schedule.group_size)

    def _open_group(self, purpose: Purpose, number: int, task: str, size: int) -> None:
        orders = [
            EpisodeOrder(task=task, group=number, attempt=a, purpose=purpose, min_policy_version=self._batch)
            for a in range(size)
        ]
        orders = [order for order in orders if order.episode not in self._progress.ended]
        self._groups[purpose, number] = Group(purpose, number, task, {order.attempt for order in orders})
        incarnations = self._progress.incarnations
        self._waiting += [replace(order, incarnation=incarnations.get(order.episode, 0)) for order in orders]

    def _fill(self) -> list[Action]:
        actions: list[Action] = []
        while self._waiting and len(self._running) < self._schedule.max_running:
            order = self._waiting.popleft()
            self._running[order.episode] = order
            actions.append(RunEpisode(order))
        return actions

    def _episode_ended(self, event: EpisodeEnded) -> list[Action]:
        del self._running[event.order.episode]
        self._count_failure(event)
        group = self._groups.get((event.order.purpose, event.order.group))
        if group is not None:
            group.open.discard(event.order.attempt)
        return [*self._fill(), *self._close_if_complete()]

    def _count_failure(self, event: EpisodeEnded) -> None:
        if event.reason in (Reason.CANCELLED, Reason.DEADLINE):
            return
        self._failures = 0 if event.reason.trustworthy else self._failures + 1
        if self._failures >= self._schedule.max_failures:
            raise RunAborted(
                f"{self._failures} episodes in a row failed through no doing of the agent; the last, "
                f"{event.order.episode}, with {event.reason}:\n{event.error}"
            )

    def _close_if_complete(self) -> list[Action]:
        if self._running or self._waiting or any(group.open for group in self._groups.values()):
            return []
        if self._eval is not None:
            return self._close_eval()
        if self._round:
            return self._close_round()
        return []

    def _close_eval(self) -> list[Action]:
        groups = tuple(sorted(number for purpose, number in self._groups if purpose is Purpose.EVAL))
        index, self._eval = self._eval, None
        assert index is not None
        self._deadline_s = None
        self._evals.add(index)
        self._groups.clear()
        return [RecordEval(index, self._batch, groups)]

    def _close_round(self) -> list[Action]:
        groups, self._round = tuple(self._round), []
        self._groups.clear()
        self._deadline_s = None
        return [TrainGroups(self._batch, groups, save=self._saves(self._batch), deadlines=self.deadlines)]

    def _check_deadline(self, now_s: float) -> list[Action]:
        if self._deadline_s is None or now_s < self._deadline_s:
            return []
        self.deadlines += 1 if self._eval is None else 0
        self._deadline_s = None
        waiting, self._waiting = self._waiting, deque()
        late = [group for group in self._groups.values() if group.open]
        if not self._may_replace(late):  # who never had a turn ends as cancelled too, and is accounted for
            begun: list[Action] = [RunEpisode(order) for order in waiting]
            self._running.update((order.episode, order) for order in waiting)
            return [*begun, *self._cancel_running()]
        return [*self._cancel_running(), *self._replace(late, now_s), *self._fill(), *self._close_if_complete()]

    def _may_replace(self, late: list[Group]) -> bool:
        """A batch replaces at most as many groups as it holds: where every group is late, it would never close."""
        room = self._schedule.groups_per_batch - self._num_replaced
        return self._eval is None and self._schedule.on_deadline == "replace" and len(late) <= room

    def _cancel_running(self) -> list[Action]:
        return [CancelEpisode(episode, Reason.DEADLINE) for episode in self._running]

    def _replace(self, late: list[Group], now_s: float) -> list[Action]:
        """Drop the groups that are late and open as many others; what their members sampled is discarded."""
        for group in late:
            del self._groups[group.purpose, group.number]
            self._round.remove(group.number)
        self._num_replaced += len(late)
        fresh = self._take_groups(len(late))
        self._round += fresh
        for group in fresh:
            self._open_train_group(group)
        if self._schedule.batch_deadline_s is not None:
            self._deadline_s = now_s + self._schedule.batch_deadline_s
        return [DropGroup(group.number) for group in late]
