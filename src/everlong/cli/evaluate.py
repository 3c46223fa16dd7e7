"""`everlong eval`: a published policy version of a run, on its held-out tasks or on others."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from everlong.cli.beside import NoAccount, beside_run, chosen_version
from everlong.cli.compose import make_sampling, open_cell
from everlong.cli.config import RunConfig
from everlong.cli.event_loop import run_to_the_end
from everlong.cli.run_folder import RunFolder
from everlong.contracts.records import Episode, EpisodeOrder, Purpose
from everlong.environments.grading.grader import open_grader
from everlong.environments.grading.verifier import check_verdict_paths
from everlong.environments.sandboxes.opening import open_backend
from everlong.environments.sandboxes.registry import scratch_folder
from everlong.environments.tasks.sources import TaskSet, read_tasks
from everlong.observe import Stages
from everlong.rollouts.harnesses.opening import open_harness
from everlong.rollouts.runner import EpisodeRunner

console = Console(highlight=False)


@dataclass(frozen=True, slots=True)
class EvalResult:
    version: int
    episodes: list[Episode]

    def kinds(self, tasks: TaskSet) -> dict[str, list[float]]:
        kind = {task.id: task.task.kind or "all" for task in tasks}
        found: dict[str, list[float]] = {}
        for episode in self.episodes:
            if episode.reward is not None:
                found.setdefault(kind[episode.order.task], []).append(episode.reward)
        return found


def eval_command(run: Path, paths: Sequence[Path], attempts: int, version: int | None, out: Path | None) -> None:
    folder = RunFolder(run)
    config = folder.read_config()
    tasks = read_tasks(paths or config.tasks.eval)
    if not len(tasks):
        raise ValueError(f"run {run} has no held-out tasks: name folders with --tasks")
    if attempts < 1:
        raise ValueError(f"attempts must be at least 1, got {attempts}")
    result = run_to_the_end(evaluate(config, folder, tasks, attempts, version))
    rewards = [episode.reward for episode in result.episodes if episode.reward is not None]
    missing = len(result.episodes) - len(rewards)
    if not rewards:
        first = next((episode for episode in result.episodes if episode.error), result.episodes[0])
        raise ValueError(
            f"none of {missing} episodes has a verdict, so there is nothing to report; {first.id} ended as {first.reason}"
            f"{': ' + first.error.strip().splitlines()[-1] if first.error.strip() else ''}"
        )
    mean, low, high = bootstrap_interval(rewards)
    table = Table("kind", "episodes", "mean reward", title=f"policy version {result.version}")
    for kind, values in sorted(result.kinds(tasks).items()):
        table.add_row(kind, str(len(values)), f"{np.mean(values):.3f}")
    table.add_row("all", str(len(rewards)), f"{mean:.3f}  (95 % {low:.3f} to {high:.3f})")
    console.print(table)
    if missing:
        console.print(f"{missing} episodes have no verdict and are not counted")
    if out is not None:
        figures = {"version": result.version, "episodes": len(rewards), "without_verdict": missing, "reward": mean}
        out.write_text(json.dumps({**figures, "low": low, "high": high}, indent=2) + "\n")


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


def bootstrap_interval(values: Sequence[float], draws: int = 2000, seed: int = 0) -> tuple[float, float, float]:
    """Mean and the 95 % percentile interval of the mean (Efron 1979); NaN where there is no value."""
    if not values:
        return float("nan"), float("nan"), float("nan")
    sample = np.asarray(values, np.float64)
    means = np.random.default_rng(seed).choice(sample, (draws, len(sample))).mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(sample.mean()), float(low), float(high)
