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
from everlong.environments.tasks.sources import task_folders
from everlong.environments.tasks.terminal.generate import Split, make_terminal

console = Console(highlight=False)
MAX_CHARS = 400
"""Of a problem: its beginning says which task and what, and a verifier may print for pages."""


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
    tasks, problems = _read_all(folders)
    reports = asyncio.run(_check(tasks, repeats, isolation, ttl_s)) if tasks else []
    problems += [f"{report.task}: {'; '.join(report.problems)}" for report in reports if not report.ok]
    for problem in problems:
        console.print(_one_line(problem), markup=False, soft_wrap=True)
    proven = sum(report.ok for report in reports)
    console.print(
        f"{proven} of {proven + len(problems)} tasks are proven: oracle 1 and empty run 0, {_times(repeats)} each"
    )
    if problems:
        sys.exit(1)


def _read_all(folders: Sequence[Path]) -> tuple[list[HarborTask], list[str]]:
    """The tasks that can be read, and of each other one why it cannot. Raises FileNotFoundError for a path without tasks."""
    tasks: dict[str, HarborTask] = {}
    problems: list[str] = []
    for folder in (folder for path in folders for folder in task_folders(path)):
        try:
            task = read_task(folder)
        except (OSError, ValueError) as error:
            problems.append(f"{folder}: {error}")
            continue
        if (other := tasks.setdefault(task.id, task)) is not task:
            problems.append(f"{folder}: task id {task.id} is taken by {other.task.folder}: name each task once")
    return list(tasks.values()), problems


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_CHARS else f"{line[:MAX_CHARS]} …"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


async def _check(tasks: list[HarborTask], repeats: int, isolation: Isolation, ttl_s: float | None) -> list[TaskReport]:
    with scratch_folder("check") as root:
        backend = open_backend(SandboxConfig(isolation=isolation), root)
        try:
            return await check_tasks(tasks, backend, repeats, ttl_s=ttl_s)
        finally:
            await backend.close()


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
