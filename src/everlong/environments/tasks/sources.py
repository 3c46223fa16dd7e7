"""Ordered sets of tasks, read and checked as a whole before a run starts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from everlong.contracts.records import Record
from everlong.environments.tasks.config import TasksConfig
from everlong.environments.tasks.harbor import HarborTask, read_task


class TaskSet(Record, frozen=True, kw_only=True):
    """Tasks in a fixed order, each id once."""

    tasks: tuple[HarborTask, ...]

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[HarborTask]:
        return iter(self.tasks)

    def __getitem__(self, index: int) -> HarborTask:
        return self.tasks[index]

    def by_id(self) -> dict[str, HarborTask]:
        return {task.id: task for task in self.tasks}

    @property
    def fingerprint(self) -> str:
        """Of ids and contents in order: a resumed run that finds another one has another data set."""
        lines = (f"{task.id}\0{task.task.content_hash}\n" for task in self.tasks)
        return blake3("".join(lines).encode()).hexdigest(16)


class RunTasks(Record, frozen=True, kw_only=True):
    """What a run trains on and what it is evaluated on."""

    train: TaskSet
    eval: TaskSet

    def by_id(self) -> dict[str, HarborTask]:
        return {**self.train.by_id(), **self.eval.by_id()}


def read_run_tasks(config: TasksConfig) -> RunTasks:
    """Both sets of a run. Raises ValueError where a held-out task is also trained, by id or by content, and where a task
    that is for evaluation only would train."""
    tasks = RunTasks(train=read_tasks(config.train), eval=read_tasks(config.eval))
    if kept := [task for task in tasks.train if task.evaluate_only]:
        raise ValueError(
            f"{len(kept)} train tasks are for evaluation only (metadata.evaluate_only), first {kept[0].id}: name their folder in "
            "tasks.eval, or with `everlong eval --tasks`"
        )
    trained = {key for task in tasks.train for key in (task.id, task.task.content_hash)}
    leaked = [task for task in tasks.eval if task.id in trained or task.task.content_hash in trained]
    if leaked:
        raise ValueError(
            f"{len(leaked)} eval tasks are also train tasks, first {leaked[0].id}: take them out of one set"
        )
    return tasks


def read_tasks(paths: Iterable[Path]) -> TaskSet:
    """Every task below the paths, in the order of the paths and of the folders' names.

    Raises FileNotFoundError for a path without tasks, ValueError for a repeated id and for what `read_task` refuses.
    """
    tasks = [read_task(folder) for path in paths for folder in task_folders(path)]
    repeated = [id for id, count in Counter(task.id for task in tasks).items() if count > 1]
    if repeated:
        folders = [task.task.folder for task in tasks if task.id == repeated[0]]
        raise ValueError(f"task id {repeated[0]} is taken by {' and '.join(folders)}: name each task once")
    return TaskSet(tasks=tuple(tasks))


def task_folders(path: Path) -> list[Path]:
    """The path itself where it holds a task.toml, else its subfolders; a stray subfolder fails in `read_task`."""
    if (path / "task.toml").exists():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"expected a task folder or a folder of task folders at {path}, found nothing there")
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith((".", "_")))
    if not folders:
        raise FileNotFoundError(f"expected task folders (each with task.toml) in {path}, found none")
    return folders
