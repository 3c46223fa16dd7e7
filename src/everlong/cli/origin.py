"""What a run found where it was started: the folder that its own code comes from, and the content of its tasks.

Written once, before the run begins. Whoever opens the run later, from wherever, compares with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from everlong.contracts.records import Record
from everlong.environments.tasks.harbor import HarborTask
from everlong.environments.tasks.sources import RunTasks


class RunOrigin(Record, frozen=True, kw_only=True):
    """Example: RunOrigin(started_in="/home/ann", train={"terminal/write-word/17": "5d0e…"}, eval={})"""

    started_in: str
    """Folder that modules of one's own are looked for in."""
    train: dict[str, str]
    """Content hash by task id."""
    eval: dict[str, str]

    def changed(self, tasks: Iterable[HarborTask]) -> list[HarborTask]:
        """Those that the run knew with another content."""
        known = {**self.train, **self.eval}
        return [task for task in tasks if known.get(task.id, task.task.content_hash) != task.task.content_hash]


def origin_of(tasks: RunTasks) -> RunOrigin:
    """Of a run that is started now, in the working folder."""
    return RunOrigin(started_in=str(Path.cwd()), train=_hashes(tasks.train), eval=_hashes(tasks.eval))


def write_origin(origin: RunOrigin, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(origin)) + b"\n")


def read_origin(path: Path) -> RunOrigin | None:
    """None for a run that wrote none. Raises ValueError where it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunOrigin)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ValueError(
            f"{path} is damaged ({error}): restore it, or remove it to go on without what it remembers"
        ) from error


def refuse_other_tasks(origin: RunOrigin, tasks: RunTasks) -> None:
    """Raises ValueError that names the first task which is not what the run was started with, and how many there are."""
    found = [*_differences("training", origin.train, tasks.train), *_differences("held-out", origin.eval, tasks.eval)]
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise ValueError(
            f"the tasks are not those that the run was started with: {found[0]}{more}. A group's number stands for a task, so "
            "going on would mix two data sets: restore the tasks, or start a new run"
        )


def _differences(role: str, known: dict[str, str], tasks: Iterable[HarborTask]) -> Iterator[str]:
    there = {task.id: task for task in tasks}
    for name, content_hash in known.items():
        if name not in there:
            yield f"{role} task {name} is gone"
        elif there[name].task.content_hash != content_hash:
            yield f"the files of {role} task {name} changed ({there[name].task.folder})"
    yield from (f"{role} task {name} is new" for name in there if name not in known)


def _hashes(tasks: Iterable[HarborTask]) -> dict[str, str]:
    return {task.id: task.task.content_hash for task in tasks}
