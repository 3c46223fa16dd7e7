"""From the settings of a schedule to the scheduler that decides."""

from __future__ import annotations

from collections.abc import Sequence

from everlong.orchestrator.agenda import Agenda
from everlong.orchestrator.async_scheduler import AsyncScheduler
from everlong.orchestrator.config import AnySchedule, AsyncConfig, PartialConfig, WarmupConfig
from everlong.orchestrator.partial_scheduler import PartialScheduler
from everlong.orchestrator.progress import Progress
from everlong.orchestrator.scheduler import RoundScheduler

AnyScheduler = RoundScheduler | PartialScheduler | AsyncScheduler


def make_scheduler(
    schedule: AnySchedule,
    warmup: WarmupConfig,
    *,
    train_tasks: Sequence[str],
    eval_tasks: Sequence[str],
    seed: int,
    progress: Progress | None = None,
) -> AnyScheduler:
    """Raises ValueError where there are batches to train and no tasks."""
    progress = progress or Progress()
    agenda = Agenda(schedule, warmup, train_tasks=train_tasks, eval_tasks=eval_tasks, seed=seed, progress=progress)
    match schedule:
        case AsyncConfig():
            return AsyncScheduler(schedule, agenda, progress)
        case PartialConfig():
            return PartialScheduler(schedule, agenda, progress)
    return RoundScheduler(schedule, agenda, progress)
