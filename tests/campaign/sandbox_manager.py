"""A process that uses sandboxes in every way, to be killed: `python -m tests.campaign.sandbox_manager KIND ROOT SEED`.

Says a line per thing that it begins. With the seed `stand` it is the one that must not be touched: it keeps a command running, and
for every line on standard input it looks whether its other sandbox still holds its file and says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Literal

from everlong.contracts.ports import Command, Sandbox, SandboxSpec, Snapshot
from everlong.contracts.records import Limits
from everlong.environments.sandboxes.gvisor import GvisorBackend
from everlong.environments.sandboxes.local import LocalBackend

Kind = Literal["namespaces", "none", "gvisor"]
Backend = LocalBackend | GvisorBackend
LIMITS = Limits(memory_mb=200, disk_mb=64, processes=40)
# A child that left its session, one in the background, and files: what a kill could leave.
BUSY = "setsid sleep 5 & sleep 5 & head -c 300000 /dev/urandom > f$RANDOM; mkdir -p d/e; echo > d/e/g; sleep 0.05"


def open_backend(kind: Kind, root: Path) -> Backend:
    return GvisorBackend(root) if kind == "gvisor" else LocalBackend(root, isolation=kind)


async def work(backend: Backend, rng: random.Random, number: int) -> None:
    """For ever."""
    for life in range(10**9):
        say("create")
        sandbox: Sandbox = await backend.create(SandboxSpec(name=f"w{number}/{life}", limits=LIMITS))
        kept: list[Snapshot] = []
        for turn in range(rng.randrange(2, 6)):
            sandbox = await _turn(backend, sandbox, kept, rng, f"w{number}/{life}.{turn}")
        say("close")
        await sandbox.close()
        for snapshot in kept:
            say("drop")
            await backend.drop(snapshot)


async def _turn(
    backend: Backend, sandbox: Sandbox, kept: list[Snapshot], rng: random.Random, fresh_name: str
) -> Sandbox:
    choice = rng.choice(["command", "command", "write", "snapshot", "rollback", "restore", "fork"])
    if choice in ("rollback", "restore") and not kept:
        choice = "snapshot"
    say(choice)
    if choice == "command":
        await sandbox.exec(Command(argv=("bash", "-c", BUSY), timeout_s=60))
    elif choice == "write":
        await sandbox.write("some/where", bytes(1000))
    elif choice == "snapshot":
        kept.append(await sandbox.snapshot(kept[-1] if kept else None))
    elif choice == "rollback":
        await sandbox.rollback(rng.choice(kept))
    elif choice == "restore":
        (clone,) = await backend.restore(rng.choice(kept), (fresh_name,))
        await sandbox.close()
        return clone
    else:
        async with _closing(await sandbox.fork(SandboxSpec(name=fresh_name, limits=LIMITS))) as copy:
            say("command")
            await copy.exec(Command(argv=("bash", "-c", "ls -R"), timeout_s=60))
    return sandbox


@contextlib.asynccontextmanager
async def _closing(sandbox: Sandbox) -> AsyncGenerator[Sandbox]:
    try:
        yield sandbox
    finally:
        say("close")
        await sandbox.close()


async def stand(backend: Backend) -> None:
    quiet = await backend.create(SandboxSpec(name="quiet", limits=LIMITS))
    await quiet.write("kept", b"kept")
    busy = await backend.create(SandboxSpec(name="busy", limits=LIMITS))
    running = asyncio.create_task(busy.exec(Command(argv=("sleep", "100000"), timeout_s=100000.0)))
    say("standing")
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        said = await quiet.exec(Command(argv=("cat", "kept"), timeout_s=60))
        say("fine" if said.output == b"kept" and not running.done() else f"touched: {said} {running}")
    running.cancel()
    await backend.close()


def say(line: str) -> None:
    print(line, flush=True)


async def run(kind: Kind, root: Path, seed: str) -> None:
    say("start")
    backend = open_backend(kind, root)
    say("probe")
    await backend.probe()
    if seed == "stand":
        await stand(backend)
    else:
        rng = random.Random(int(seed))
        say("ready")
        await asyncio.gather(*(work(backend, random.Random(rng.random()), number) for number in range(2)))


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))  # ty: ignore[invalid-argument-type]
