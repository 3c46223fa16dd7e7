"""`everlong tasks make|check|show`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from everlong.environments.quality.check import TaskReport, check_tasks
from everlong.environments.sandboxes.config import Isolation, SandboxConfig
from everlong.environments.sandboxes.opening import open_backend
from everlong.environments.sandboxes.registry import scratch_folder
from everlong.environments.tasks.harbor import HarborTask, read_task
from everlong.environments.tasks.humaneval.generate import make_humaneval
from everlong.environments.tasks.humaneval.package import read_problems
from everlong.environments.tasks.sources import read_tasks
from everlong.environments.tasks.terminal.generate import Split, make_terminal

console = Console(highlight=False)
MAX_ROWS = 40


def make_command(
    source: str, out: Path, count: int | None, seed: int | None, split: str | None, kinds: Sequence[str]
) -> None:
    """Raises ValueError for an unknown source and for an option that the source does not have."""
    if source == "terminal":
        folders = _make_terminal(out, count, seed, split, kinds)
    elif source == "humaneval":
        given = [
            name for name, value in (("seed", seed), ("split", split), ("kinds", kinds or None)) if value is not None
        ]
        if given:
            raise ValueError(f"--{given[0]} has no effect on humaneval, whose problems are fixed: leave it out")
        folders = make_humaneval(out, read_problems(), count)
    else:
        raise ValueError(f"there is no task source {source!r}: there are terminal and humaneval")
    console.print(f"wrote {len(folders)} tasks to {out}; `everlong tasks check {out}` proves them")


def _make_terminal(
    out: Path, count: int | None, seed: int | None, split: str | None, kinds: Sequence[str]
) -> list[Path]:
    if count is None:
        raise ValueError("terminal tasks are generated: say how many with --count")
    if split not in {None, *Split}:
        raise ValueError(f"there is no split {split!r}: there are {', '.join(Split)}")
    return make_terminal(out, count, seed=seed or 0, split=split or Split.TRAIN, kinds=tuple(kinds))


def check_command(folders: Sequence[Path], repeats: int, isolation: Isolation, ttl_s: float | None) -> None:
    """Exit code 1 where a task is not proven."""
    if ttl_s is not None and not ttl_s > 0:
        raise ValueError(f"--ttl-s must be above 0 seconds, got {ttl_s:g}")
    if not folders:
        raise ValueError("give at least one task folder, or a folder of task folders")
    reports = asyncio.run(_check(list(read_tasks(folders)), repeats, isolation, ttl_s))
    console.print(_table([r for r in reports if not r.ok] or reports))
    bad = sum(not report.ok for report in reports)
    console.print(
        f"{len(reports) - bad} of {len(reports)} tasks are proven: oracle 1 and empty run 0, {repeats} times each"
    )
    if bad:
        sys.exit(1)


async def _check(tasks: list[HarborTask], repeats: int, isolation: Isolation, ttl_s: float | None) -> list[TaskReport]:
    with scratch_folder("check") as root:
        backend = open_backend(SandboxConfig(isolation=isolation), root)
        try:
            return await check_tasks(tasks, backend, repeats, ttl_s=ttl_s)
        finally:
            await backend.close()


def _table(reports: list[TaskReport]) -> Table:
    table = Table("task", "oracle", "empty", "problems and notes")
    for report in reports[:MAX_ROWS]:
        remarks = "; ".join([*report.problems, *report.notes])
        table.add_row(report.task, _rewards(report.oracle_rewards), _rewards(report.empty_rewards), remarks)
    if len(reports) > MAX_ROWS:
        table.add_row("…", "", "", f"{len(reports) - MAX_ROWS} more")
    return table


def _rewards(rewards: Sequence[float | None]) -> str:
    return " ".join("–" if reward is None else f"{reward:g}" for reward in rewards)


def show_command(folder: Path) -> None:
    task = read_task(folder)
    asked = task.task
    console.print(f"[bold]{asked.id}[/bold]  {asked.content_hash}")
    console.print(asked.instruction, markup=False)
    table = Table(show_header=False)
    table.add_row("workdir", asked.workdir)
    table.add_row("agent time", f"{asked.agent_timeout_s:g} s")
    table.add_row("verifier time", f"{asked.verifier_timeout_s:g} s")
    table.add_row("memory", f"{asked.limits.memory_mb} MB")
    table.add_row("network", "on" if asked.network else "off")
    table.add_row("solution", "yes" if task.solution else "no: cannot be proven")
    for note in task.notes:
        table.add_row("note", note)
    if task.ignored_keys:
        table.add_row("ignored keys", ", ".join(task.ignored_keys))
    console.print(table)
    for name in sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file()):
        console.print(f"  {name}", markup=False)
