"""The run's plan, the same for every schedule: which batch is under way, what is due around it, which groups come next.

Pure. Evaluations stand between batches: before the first RL batch, every `eval_every`, and after the last.
"""

from __future__ import annotations

from collections.abc import Sequence

from everlong.contracts.records import Purpose
from everlong.orchestrator.config import AnySchedule, WarmupConfig
from everlong.orchestrator.cursor import task_of_group
from everlong.orchestrator.episode_queue import EpisodeQueue
from everlong.orchestrator.events import RecordEval, WarmUp
from everlong.orchestrator.progress import Progress


def is_checkpoint_due(batch: int, schedule: AnySchedule, warmup: WarmupConfig) -> bool:
    """Whether a checkpoint follows batch `batch`: at the interval, and at the end of the warm-up and of the run."""
    done = batch + 1
    ends_phase = done in (warmup.num_batches, warmup.num_batches + schedule.num_batches)
    return ends_phase or done % schedule.checkpoint_every == 0


class Agenda:
    def __init__(
        self,
        schedule: AnySchedule,
        warmup: WarmupConfig,
        *,
        train_tasks: Sequence[str],
        eval_tasks: Sequence[str],
        seed: int,
        progress: Progress,
    ) -> None:
        if schedule.num_batches and not train_tasks:
            raise ValueError("there are batches to train but no training tasks: give tasks.train a folder with tasks")
        self._schedule, self._warmup, self._seed = schedule, warmup, seed
        self._train_tasks, self._eval_tasks = list(train_tasks), list(eval_tasks)
        self._taken = set(progress.consumed)
        self._next_group = 0
        self._evals = set(progress.evals)
        self.batch = progress.num_batches
        """The batch under way: batches before it are trained."""

    @property
    def num_batches(self) -> int:
        """All batches of the run, warm-up included."""
        return self._warmup.num_batches + self._schedule.num_batches

    @property
    def index(self) -> int:
        """RL batches that are trained; negative during the warm-up."""
        return self.batch - self._warmup.num_batches

    @property
    def warm_up(self) -> WarmUp | None:
        """The supervised batch under way, if it is one."""
        return WarmUp(self.batch, save=self.saves(self.batch)) if self.index < 0 else None

    def saves(self, batch: int) -> bool:
        return is_checkpoint_due(batch, self._schedule, self._warmup)

    # Groups

    def take(self, groups: Sequence[int]) -> None:
        """These are served, or being served."""
        self._taken.update(groups)

    def next_group(self) -> int:
        """The next in order that nobody took."""
        while self._next_group in self._taken:
            self._next_group += 1
        self._taken.add(self._next_group)
        return self._next_group

    def give_back(self, group: int) -> None:
        """Nothing of it began: it is the next in order again."""
        self._taken.discard(group)
        self._next_group = min(self._next_group, group)

    def open_train_group(self, queue: EpisodeQueue, group: int, *, held: int, oldest: int | None = None) -> None:
        """Queue its episodes. `held`: the version that the engine holds; `oldest`: the one it held at the first opening."""
        task = self._train_tasks[task_of_group(group, len(self._train_tasks), self._seed)]
        queue.open(Purpose.TRAIN, group, task, self._schedule.group_size, held=held, oldest=oldest)

    # Evaluations

    @property
    def eval_due(self) -> bool:
        every, index = self._schedule.eval_every, self.index
        due = index == 0 or self.batch == self.num_batches or bool(every and index % every == 0)
        return due and bool(self._eval_tasks) and index not in self._evals

    def open_eval(self, queue: EpisodeQueue) -> None:
        """Its groups are numbered over the whole run, and have the deadline of the evaluation together."""
        first, within_s = self.index * len(self._eval_tasks), self._schedule.eval_deadline_s
        for place, task in enumerate(self._eval_tasks):
            queue.open(Purpose.EVAL, first + place, task, self._schedule.eval_attempts, held=self.batch)
        if within_s is not None:
            queue.set_deadline(Purpose.EVAL, range(first, first + len(self._eval_tasks)), within_s)

    def close_eval(self, queue: EpisodeQueue) -> RecordEval:
        groups = tuple(sorted(group.number for group in queue.of(Purpose.EVAL)))
        for number in groups:
            queue.forget(Purpose.EVAL, number)
        self._evals.add(self.index)
        return RecordEval(self.index, self.batch, groups)
