"""Puts a task's files into a fresh sandbox."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import msgspec

from everlong.contracts.ports import Mount, Sandbox, SandboxBackend, SandboxSpec
from everlong.environments.tasks.harbor import VERDICT_FOLDER, HarborTask


async def open_task(
    task: HarborTask, backend: SandboxBackend, name: str, *, ttl_s: float | None = None, mounts: tuple[Mount, ...] = ()
) -> Sandbox:
    """A sandbox that holds what the task's environment says and nothing of its tests or solution. Raises SandboxError.

    An agent may write into its own verdict folder, as in the format's own runner: grading never reads it but to see who did.
    """
    asked = task.task
    spec = SandboxSpec(
        name=name,
        workdir=asked.workdir,
        env=asked.env,
        mounts=mounts,
        writable=(VERDICT_FOLDER,),
        limits=asked.limits,
        network=asked.network,
        ttl_s=ttl_s,
    )
    if _is_one_folder(task):
        return await backend.create(msgspec.structs.replace(spec, files=task.copies[0].source))
    with tempfile.TemporaryDirectory(prefix="everlong-task-", dir=backend.scratch) as staged:
        await asyncio.to_thread(_stage, task, Path(staged))
        return await backend.create(msgspec.structs.replace(spec, files=staged))


def _is_one_folder(task: HarborTask) -> bool:
    return (
        len(task.copies) == 1
        and not task.folders
        and task.copies[0].target == "."
        and Path(task.copies[0].source).is_dir()
    )


def _stage(task: HarborTask, staged: Path) -> None:
    for folder in task.folders:
        (staged / folder).mkdir(parents=True, exist_ok=True)
    for copy in task.copies:
        source, target = Path(copy.source), staged / copy.target
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(source, target)
