"""A backend of sandboxes in a process of its own, as root or as an ordinary user, in which attacks are run one by one.

    python -m tests.attacks.place KIND ROOT GIVEN USER RUNSC

KIND is local or gvisor, ROOT the folder of the sandboxes, GIVEN one that they see read-only, USER the user to become (empty for
none; everything is imported before, as that user may not be able to read where it lies), RUNSC gVisor's program (may be empty).
EVERLONG_WORD holds the secret. Standard input names an attack, or `grade` and a plant, a line; standard output answers with a line
of JSON: what came through. The end of standard input closes the backend.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401  (asyncio imports it with the first thread: too late after the user has changed)
import contextlib
import ctypes
import json
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

from tests.attacks.known import BY_NAME, LIMITS, MAX_NAMES, PLANTS, PRELUDE, Attack
from tests.attacks.stage import Stage

from everlong.contracts.errors import SandboxError, WorkspaceTooLarge
from everlong.contracts.ports import Command, ExecResult, Mount, Sandbox, SandboxSpec
from everlong.contracts.records import Limits
from everlong.environments.grading.verifier import grade
from everlong.environments.sandboxes import layout
from everlong.environments.sandboxes.gvisor import GvisorBackend
from everlong.environments.sandboxes.local import LocalBackend
from everlong.environments.sandboxes.trees import remove_tree
from everlong.environments.tasks.harbor import read_task
from everlong.environments.tasks.terminal.generate import make_terminal

PYTHON = "/usr/bin/python3"
ANSWER_S = 60.0

Backend = LocalBackend | GvisorBackend
Beside = Callable[[Sandbox, Stage], Awaitable[list[str]]]


class Place:
    """Runs attacks in sandboxes of one backend."""

    def __init__(self, backend: Backend, folder: Path, given: Path, word: str) -> None:
        self._backend, self._folder, self._given, self._word = backend, folder, given, word
        self._count = 0

    async def run(self, name: str) -> list[str]:
        """What came through: nothing is what there should be."""
        attack = BY_NAME[name]
        self._count += 1
        stage = Stage(self._folder / f"stage-{self._count}", self._given, self._backend.claim.folder.parent, self._word)
        with stage:
            try:
                async with self._sandbox(attack, "agent") as sandbox:
                    found = await self._strike(attack, sandbox, stage)
                if attack.twice:
                    async with self._sandbox(attack, "next") as sandbox:
                        found += await self._strike(attack, sandbox, stage)
            except SandboxError as error:
                return [f"the sandbox failed, which voids the episode: {error}"]
            found += stage.harm()
            found += [f"{path.name} is left" for path in self._backend.claim.folder.glob("s-agent*")]
        return found

    @contextlib.asynccontextmanager
    async def _sandbox(self, attack: Attack, name: str) -> AsyncGenerator[Sandbox]:
        mounts = (Mount(source=str(self._given), target="/given"),)
        spec = SandboxSpec(name=name, limits=attack.limits, mounts=mounts, network=attack.network)
        sandbox = await self._backend.create(spec)
        try:
            yield sandbox
        finally:
            await sandbox.close()

    async def _strike(self, attack: Attack, sandbox: Sandbox, stage: Stage) -> list[str]:
        running = asyncio.create_task(self._exec(attack, sandbox, stage))
        found = await BESIDE[attack.name](sandbox, stage) if attack.name in BESIDE else []
        result = await running
        said = result.output.decode(errors="replace")
        if not (attack.own_kernel and isinstance(self._backend, GvisorBackend)):
            found += [line for line in said.splitlines() if "ESCAPED" in line]
        if attack.name in AFTER:
            found += await AFTER[attack.name](sandbox, stage, result)
        fine = await sandbox.exec(Command(argv=("sh", "-c", "echo fine"), timeout_s=ANSWER_S))
        if fine.output != b"fine\n":
            found.append(f"the next command said {fine.output!r}")
        return found

    async def _exec(self, attack: Attack, sandbox: Sandbox, stage: Stage) -> ExecResult:
        aim = {**stage.aim, "workdir": "/app", "given": "/given/id", "names": MAX_NAMES}
        argv = (PYTHON, "-c", PRELUDE + attack.script, json.dumps(aim))
        return await sandbox.exec(Command(argv=argv, timeout_s=attack.timeout_s))

    async def grade(self, plant: str, folder: Path) -> list[str]:
        """The verdict of a task that the agent did not solve, but whose verifier it tried to talk into saying so."""
        task = read_task(make_terminal(folder / f"task-{plant}", 1, kinds=("count-lines",))[0])
        spec = SandboxSpec(name=f"graded-{plant}", limits=LIMITS, writable=("/logs/verifier",))
        sandbox = await self._backend.create(spec)
        try:
            argv = (PYTHON, "-c", PRELUDE + PLANTS[plant], "{}")
            await sandbox.exec(Command(argv=argv, timeout_s=ANSWER_S))
            verdict = await grade(task, sandbox)
        finally:
            await sandbox.close()
        return [] if verdict.reward == 0.0 else [f"the verdict is {verdict}"]


# What is looked at while the attack runs -----------------------------------------------------------------------------


async def read_the_swapped_folder(sandbox: Sandbox, stage: Stage) -> list[str]:
    for _ in range(100):
        await asyncio.sleep(0.02)
        with contextlib.suppress(SandboxError, FileNotFoundError):
            if stage.word.encode() in await sandbox.read("way/secret"):
                return ["the host's file was read in the folder's place"]
    return []


async def watch_a_file(sandbox: Sandbox, stage: Stage) -> list[str]:
    for _ in range(500):
        with contextlib.suppress(FileNotFoundError):
            await sandbox.read("holding")
            break
        await asyncio.sleep(0.02)
    else:
        return ["the attack never began"]
    watch = ctypes.CDLL(None).inotify_init1(os.O_CLOEXEC)
    if watch < 0:
        return ["the host's user gets no inotify instance any more"]
    os.close(watch)
    return []


BESIDE: dict[str, Beside] = {"swapped-folder": read_the_swapped_folder, "watches": watch_a_file}


# What is looked at afterwards ----------------------------------------------------------------------------------------


async def use_the_link(sandbox: Sandbox, stage: Stage, result: ExecResult) -> list[str]:
    found = []
    with contextlib.suppress(SandboxError, FileNotFoundError):
        if stage.word.encode() in await sandbox.read("link"):
            found.append("the host's file was read through the link")
    for path in ("link", "folder/planted"):
        with contextlib.suppress(SandboxError):
            await sandbox.write(path, b"from outside")
    return found


async def expect_an_unmoved_supervisor(sandbox: Sandbox, stage: Stage, result: ExecResult) -> list[str]:
    return [] if (result.exit_code, result.output) == (0, b"still here\n") else [f"it ended otherwise: {result}"]


async def write_the_verdict(sandbox: Sandbox, stage: Stage, result: ExecResult) -> list[str]:
    await sandbox.write("verdict", b"0")
    await asyncio.sleep(0.5)
    said = await sandbox.read("verdict")
    return [] if said == b"0" else [f"the verdict was overwritten: {said!r}"]


FIND = """
import os, sys
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        words = open(f"/proc/{pid}/cmdline").read().split(chr(0))
    except OSError:
        continue
    if words[:2] == ["sleep", sys.argv[1]]:
        print("ESCAPED", pid)
"""


async def look_for_the_marked(sandbox: Sandbox, stage: Stage, result: ExecResult) -> list[str]:
    inside = await sandbox.exec(Command(argv=(PYTHON, "-c", FIND, stage.mark), timeout_s=ANSWER_S))
    if b"ESCAPED" in inside.output or await asyncio.to_thread(stage.outlived):
        return ["it outlived its command"]
    return []


async def expect_its_time_to_be_over(sandbox: Sandbox, stage: Stage, result: ExecResult) -> list[str]:
    cut = [] if (result.exit_code, result.timed_out) == (124, True) else [f"it was not cut: {result}"]
    return cut + await look_for_the_marked(sandbox, stage, result)


async def expect_cut_output(sandbox: Sandbox, stage: Stage, result: ExecResult) -> list[str]:
    held = len(result.output) <= LIMITS.output_bytes and result.truncated
    return [] if held else [f"{len(result.output)} bytes of output"]


async def read_the_pipe(sandbox: Sandbox, stage: Stage, result: ExecResult) -> list[str]:
    try:
        async with asyncio.timeout(ANSWER_S):
            await sandbox.read("answer")
    except FileNotFoundError:
        return await fork_it(sandbox, stage, result)
    except TimeoutError:
        return ["the reader hangs"]
    return ["a pipe was read"]


async def fork_it(sandbox: Sandbox, stage: Stage, result: ExecResult) -> list[str]:
    """A copy for a verifier can be made, or is refused as the agent's doing."""
    try:
        async with asyncio.timeout(ANSWER_S):
            copy = await sandbox.fork(SandboxSpec(name="agent-copy", limits=Limits(memory_mb=96, disk_mb=32)))
            await copy.close()
    except WorkspaceTooLarge:
        return []
    except TimeoutError:
        return ["making the copy hangs"]
    return []


async def expect_its_own_code(sandbox: Sandbox, stage: Stage, result: ExecResult) -> list[str]:
    return [] if result.exit_code == 3 else [f"exit code {result.exit_code} was believed"]


AFTER: dict[str, Callable[[Sandbox, Stage, ExecResult], Awaitable[list[str]]]] = {
    "link-to-host-file": use_the_link,
    "link-to-host-folder": use_the_link,
    "signal-supervisor": expect_an_unmoved_supervisor,
    "background-writer": write_the_verdict,
    "outlive": look_for_the_marked,
    "never-end": expect_its_time_to_be_over,
    "output-bomb": expect_cut_output,
    "blocking-pipe": read_the_pipe,
    "tree-that-stays": fork_it,
    "disk-bomb": fork_it,
    "disk-of-many": fork_it,
    "hidden-files": fork_it,
    "names-bomb": fork_it,
    "forged-answer": expect_its_own_code,
}


# The process ---------------------------------------------------------------------------------------------------------


async def serve(kind: str, root: Path, given: Path, runsc: str) -> None:
    word = os.environ["EVERLONG_WORD"]
    layout.MAX_ENTRIES = MAX_NAMES
    try:
        backend: Backend = (
            GvisorBackend(root, runsc=Path(runsc) if runsc else None)
            if kind == "gvisor"
            else LocalBackend(root, isolation="namespaces")
        )
        capabilities = await backend.probe()
    except SandboxError as error:
        say({"refused": str(error)})
        return
    folder = root.parent / f"{root.name}-stages"
    folder.mkdir()
    place = Place(backend, folder, given, word)
    files = folder / "files"
    files.mkdir()
    (files / "neighbour").write_text(word)
    await backend.create(SandboxSpec(name="neighbour", files=str(files)))
    say({"claim": str(backend.claim.folder), "reason": capabilities.reason})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        first, _, rest = line.strip().partition(" ")
        found = await place.grade(rest, folder) if first == "grade" else await place.run(first)
        say({"found": found})
    await backend.close()
    remove_tree(folder)


def say(answer: object) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    kind, root, given, user, runsc = sys.argv[1:]
    if user:
        os.setgroups([])
        os.setresgid(int(user), int(user), int(user))
        os.setresuid(int(user), int(user), int(user))
    asyncio.run(serve(kind, Path(root), Path(given), runsc))


if __name__ == "__main__":
    main()
