"""Runs a task's verifier on a copy of what the agent left behind, out of the agent's reach.

The copy holds the workdir and nothing else: tests come from the task (read-only at /tests), the folder of the verdict is
fresh, the tools are the pinned ones, and no process of the agent is left. No verdict is never a verdict of 0.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
from collections.abc import Iterable
from pathlib import Path

import msgspec

from everlong.contracts.errors import Reason, SandboxError, WorkspaceTooLarge
from everlong.contracts.ports import Command, ExecResult, Mount, Sandbox, SandboxBackend, SandboxSpec
from everlong.contracts.records import MAX_REWARD, Verdict
from everlong.environments.tasks.content_hash import content_hash
from everlong.environments.tasks.harbor import VERDICT_FOLDER, HarborTask

REWARD_FILES = (f"{VERDICT_FOLDER}/reward.json", f"{VERDICT_FOLDER}/reward.txt")
"""In the order in which they are believed."""

MARGIN_S = 5.0
"""For making the copy and reading the verdict; a fork of a large workdir takes seconds, not minutes."""

_ATTEMPTS = 3
_OUTPUT_CHARS = 4000
_REWARD_BYTES = 1 << 16
_TEXT_BYTES = 1 << 20
"""A larger file of the tests is data."""
_PINNED_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    # Not the workdir, which is the agent's: tools load settings and code from their home.
    "HOME": VERDICT_FOLDER,
    "PYTHONNOUSERSITE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


async def grade(task: HarborTask, sandbox: Sandbox) -> Verdict:
    """What the verifier says of the sandbox's workdir. Never raises for a failure of sandbox or verifier: it is the reason.

    A sandbox that dies under the verifier is tried again on a new copy, three times in all. An agent that left more than its
    limits allow to be copied gets 0 and the flag `workspace_too_large`.
    """
    if await asyncio.to_thread(content_hash, Path(task.task.folder)) != task.task.content_hash:
        return Verdict(
            reward=None,
            reason=Reason.VERIFIER_CRASH,
            flags=("task_changed",),
            output=f"the files in {task.task.folder} changed after the task was read: its verdict would be another task's",
        )
    flags = await _planted(sandbox)
    failures: list[str] = []
    for attempt in range(_ATTEMPTS):
        try:
            return await _grade_copy(task, sandbox, f"{sandbox.name}-grade-{attempt}", flags)
        except WorkspaceTooLarge as error:
            return Verdict(reward=0.0, flags=(*flags, "workspace_too_large"), output=str(error))
        except SandboxError as error:
            failures.append(str(error))
    return Verdict(reward=None, reason=Reason.SANDBOX_CRASH, flags=flags, output="\n".join(failures))


def check_time_budget(agent_timeout_s: float, verifier_timeout_s: float, ttl_s: float) -> None:
    """Raises ValueError unless a sandbox lives long enough for the agent, then the verifier, and a margin."""
    needed_s = agent_timeout_s + verifier_timeout_s + MARGIN_S
    if not ttl_s > needed_s:
        raise ValueError(
            f"a sandbox must live longer than {needed_s:g} s (agent {agent_timeout_s:g} s, verifier {verifier_timeout_s:g} s, "
            f"margin {MARGIN_S:g} s), got ttl {ttl_s:g} s: raise the ttl or shorten the time limits"
        )


def fixed_verdict_path(task: HarborTask) -> str | None:
    """Why the task's verdict would be lost where commands do not see the sandbox's own paths; None where it is not.

    A file of the tests that names the verdict's folder must take `EVERLONG_ROOT` into account; that is all that is looked at.
    """
    for path in sorted(Path(task.tests).rglob("*")):
        if path.is_file() and path.stat().st_size <= _TEXT_BYTES:
            text = path.read_bytes()
            if VERDICT_FOLDER.encode() in text and b"EVERLONG_ROOT" not in text:
                return (
                    f"tests/{path.relative_to(task.tests)} of task {task.id} names {VERDICT_FOLDER}, which without namespaces "
                    f'(isolation none) is a folder of this machine: write to "$EVERLONG_ROOT{VERDICT_FOLDER}" (it is empty with '
                    "namespaces), or run where namespaces can be had"
                )
    return None


async def check_verdict_paths(tasks: Iterable[HarborTask], backend: SandboxBackend) -> None:
    """Raises ValueError for tasks whose verdict could not be found in this backend's sandboxes, SandboxError where it has none."""
    if (await backend.probe()).real_paths:
        return
    if lost := [why for task in tasks if (why := fixed_verdict_path(task)) is not None]:
        more = f"; and {len(lost) - 1} tasks more" if len(lost) > 1 else ""
        raise ValueError(f"{lost[0]}{more}")


async def _planted(sandbox: Sandbox) -> tuple[str, ...]:
    """A verdict that lies there before the verifier ran is the agent's work. It is not in the copy, so it counts nothing."""
    for path in REWARD_FILES:
        try:
            await sandbox.read(path, max_bytes=1)
        except (FileNotFoundError, SandboxError):
            continue
        return ("verdict_preexisting",)
    return ()


async def _grade_copy(task: HarborTask, sandbox: Sandbox, name: str, flags: tuple[str, ...]) -> Verdict:
    timeout_s, limits = task.task.verifier_timeout_s, task.task.limits
    # A workdir that is full must not take from the verifier the room in which it works.
    limits = msgspec.structs.replace(limits, disk_mb=2 * limits.disk_mb)
    spec = SandboxSpec(
        name=name,
        workdir=task.task.workdir,
        env={**task.task.env, **_PINNED_ENV, **task.verifier_env},
        mounts=(Mount(source=task.tests, target="/tests"),),
        writable=(VERDICT_FOLDER,),
        limits=limits,
        network=task.task.network,
        ttl_s=timeout_s + 2 * MARGIN_S,
    )
    copy = await sandbox.fork(spec)
    try:
        result = await copy.exec(Command(argv=("bash", "/tests/test.sh"), timeout_s=timeout_s))
        return await _verdict(copy, result, flags)
    finally:
        await copy.close()


async def _verdict(copy: Sandbox, result: ExecResult, flags: tuple[str, ...]) -> Verdict:
    output = result.output.decode(errors="replace")[-_OUTPUT_CHARS:]
    if result.timed_out:
        return Verdict(reward=None, reason=Reason.VERIFIER_TIMEOUT, flags=flags, output=output)
    try:
        return Verdict(reward=await _read_reward(copy), flags=flags, output=output)
    except ValueError as error:
        said = f"{output}\n[no verdict: {error}; the verifier ended with exit code {result.exit_code}]".lstrip()
        return Verdict(reward=None, reason=Reason.VERIFIER_CRASH, flags=flags, output=said)


async def _read_reward(copy: Sandbox) -> float:
    """Raises ValueError where no file holds a finite number."""
    for path in REWARD_FILES:
        try:
            raw = await copy.read(path, max_bytes=_REWARD_BYTES)
        except FileNotFoundError:
            continue
        return parse_reward(raw, posixpath.basename(path))
    raise ValueError("the verifier wrote neither reward.json nor reward.txt")


def parse_reward(raw: bytes, name: str) -> float:
    """The number in a reward file: text, or JSON that is a number or an object with the key `reward`. Raises ValueError."""
    text = raw.decode("utf-8", errors="replace").strip()
    if not text:
        raise ValueError(f"{name} is empty")
    value: object = json.loads(text) if name.endswith(".json") else _number(text, name)
    if isinstance(value, dict):
        value = value.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_REWARD:
        raise ValueError(f"{name} must hold a finite number of at most {MAX_REWARD:.3g}, got {text[:80]!r}")
    return float(value)


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} must hold a number, got {text[:80]!r}") from None
