"""`everlong eval`: a published policy version of a run, on its held-out tasks or on others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from everlong.cli.beside import NoAccount, beside_run, chosen_version
from everlong.cli.compose import make_sampling, open_cell
from everlong.cli.config import RunConfig
from everlong.cli.event_loop import run_to_the_end
from everlong.cli.run_folder import RunFolder
from everlong.cli.scores import Score, Scores, score_rows, scores_of
from everlong.contracts.records import Episode, EpisodeOrder, Purpose
from everlong.environments.grading.grader import open_grader
from everlong.environments.grading.verifier import check_verdict_paths
from everlong.environments.sandboxes.opening import open_backend
from everlong.environments.sandboxes.registry import scratch_folder
from everlong.environments.tasks.harbor import HarborTask
from everlong.environments.tasks.sources import TaskSet, read_tasks
from everlong.observe import Stages
from everlong.rollouts.harnesses.opening import open_harness
from everlong.rollouts.runner import EpisodeRunner

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class EvalResult:
    version: int
    episodes: list[Episode]


def eval_command(run: Path, paths: Sequence[Path], attempts: int, version: int | None, out: Path | None) -> None:
    folder = RunFolder(run)
    config = folder.open()
    tasks = read_tasks(paths or config.tasks.eval)
    if not len(tasks):
        raise ValueError(f"run {run} has no held-out tasks: name folders with --tasks")
    if attempts < 1:
        raise ValueError(f"attempts must be at least 1, got {attempts}")
    origin = folder.read_origin()
    changed = [] if origin is None else origin.changed(tasks)
    if changed:
        console.print(f"{_changed_text(changed, len(tasks))}: figures are not comparable", style="yellow", markup=False)
    result = run_to_the_end(evaluate(config, folder, tasks, attempts, version))
    scores = scores_of(result.episodes, tasks)
    _refuse_silence(result.episodes, scores.total)
    _show(scores, result.version, attempts)
    if out is not None:
        figures = {"version": result.version, **msgspec.to_builtins(scores.total), "kinds": scores.kinds}
        figures["changed_tasks"] = [task.id for task in changed]
        out.write_bytes(msgspec.json.format(msgspec.json.encode(figures)) + b"\n")


def _changed_text(changed: Sequence[HarborTask], num_tasks: int) -> str:
    first = changed[0]
    return f"{len(changed)} of {num_tasks} tasks changed since the run started, first {first.id} ({first.task.folder})"


def _refuse_silence(episodes: Sequence[Episode], total: Score) -> None:
    """Raises ValueError where nobody judged anything."""
    if total.episodes:
        return
    first = next((episode for episode in episodes if episode.error), episodes[0])
    raise ValueError(
        f"none of {total.without_verdict} episodes has a verdict, so there is nothing to report; {first.id} ended as "
        f"{first.reason}{': ' + first.error.strip().splitlines()[-1] if first.error.strip() else ''}"
    )


def _show(scores: Scores, version: int, attempts: int) -> None:
    header, *rows = score_rows(scores)
    table = Table(*header, title=f"policy version {version}")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    if scores.total.without_verdict:
        console.print(f"{scores.total.without_verdict} episodes have no verdict and are not counted")
    if attempts > 1:
        console.print("attempts at one task are alike, so the intervals are rather too narrow")


async def evaluate(
    config: RunConfig, folder: RunFolder, tasks: TaskSet, attempts: int, version: int | None
) -> EvalResult:
    """Raises NotFound where the run has not published that version, or none at all."""
    wanted, stages = chosen_version(config, folder, version), Stages(Console(stderr=True))
    with scratch_folder("eval") as scratch:
        backend = open_backend(config.sandbox, scratch)
        aside, settings = beside_run(config, folder, scratch)
        async with open_cell(settings, aside, stages) as cell:
            with stages.stage(f"loading policy version {wanted}"):
                status = await cell.engine.update(wanted)
            runner = EpisodeRunner(
                tasks=tasks.by_id(),
                backend=backend,
                harness=open_harness(config.harness),
                sampling=make_sampling(config, cell.engine),
                journal=NoAccount(),
                ttl_s=config.sandbox.ttl_s,
                grader=open_grader(config.grading),
            )
            try:
                await check_verdict_paths(tasks, backend)
                stages.say(f"running {len(tasks) * attempts} episodes")
                episodes = await _run_all(runner, tasks, attempts, config.schedule.max_running, status.policy_version)
            finally:
                await backend.close()
    return EvalResult(status.policy_version, episodes)


async def _run_all(runner: EpisodeRunner, tasks: TaskSet, attempts: int, limit: int, version: int) -> list[Episode]:
    slots = asyncio.Semaphore(limit)

    async def one(group: int, task: str, attempt: int) -> Episode:
        order = EpisodeOrder(task=task, group=group, attempt=attempt, purpose=Purpose.EVAL, min_policy_version=version)
        async with slots:
            return await runner.run(order)

    orders = [(g, task.id, attempt) for g, task in enumerate(tasks) for attempt in range(attempts)]
    return list(await asyncio.gather(*(one(*order) for order in orders)))
