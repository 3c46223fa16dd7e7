"""More sandboxes than fit into memory: a backend in front of another one, which pauses to disk what nobody calls.

Between two calls a model thinks, for most of a sandbox's life. `Overcommit` decides who holds memory; this carries it out.
Whoever calls a paused sandbox waits until it is resumed, and its time limit starts then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from everlong.contracts.errors import SandboxError
from everlong.contracts.ports import (
    Capabilities,
    Command,
    ExecResult,
    PauseTo,
    Sandbox,
    SandboxBackend,
    SandboxSpec,
    Snapshot,
)
from everlong.environments.sandboxes.layout import check_names
from everlong.environments.sandboxes.overcommit import Action, Overcommit, Pause, State


@dataclass(slots=True)
class PoolCounts:
    """What over-commit did, for a benchmark or a report."""

    num_pauses: int = 0
    num_wakes: int = 0
    max_resident: int = 0
    waits_s: list[float] = field(default_factory=list)
    """Of every call, until its sandbox was there."""


class PooledSandbox:
    """A sandbox that is there when it is called. `pause` and `resume` only say that nobody or somebody will call soon."""

    def __init__(self, pool: PooledBackend, name: str) -> None:
        self._pool, self._name = pool, name

    @property
    def name(self) -> str:
        return self._name

    async def exec(self, command: Command) -> ExecResult:
        async with self._pool.present(self._name) as sandbox:
            return await sandbox.exec(command)

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        async with self._pool.present(self._name) as sandbox:
            return await sandbox.read(path, max_bytes)

    async def write(self, path: str, data: bytes) -> None:
        async with self._pool.present(self._name) as sandbox:
            await sandbox.write(path, data)

    async def fork(self, spec: SandboxSpec) -> PooledSandbox:
        # One at a time: two that each hold a place and wait for a second one would wait for each other.
        async with self._pool.forking, self._pool.present(self._name) as sandbox:
            return await self._pool.open(spec.name, lambda: sandbox.fork(spec))

    async def pause(self, to: PauseTo = "stopped") -> None:
        raise ValueError(
            "the pool decides when its sandboxes are paused: leave sandbox.pause_after_s and max_resident out"
        )

    async def resume(self) -> None:
        """Nothing: every call resumes."""

    async def snapshot(self, parent: Snapshot | None = None) -> Snapshot:
        async with self._pool.present(self._name) as sandbox:
            return await sandbox.snapshot(parent)

    async def rollback(self, snapshot: Snapshot) -> None:
        async with self._pool.present(self._name) as sandbox:
            await sandbox.rollback(snapshot)

    async def close(self) -> None:
        await self._pool.close_one(self._name)


class PooledBackend:
    """`pause_after_s`: seconds without a call after which a sandbox goes to disk; None only where another needs its place.
    `max_resident`: how many may hold memory at once, at least 2, since a fork needs two places; None for no limit."""

    def __init__(self, inner: SandboxBackend, *, pause_after_s: float | None, max_resident: int | None) -> None:
        if max_resident is not None and max_resident < 2:
            raise ValueError(
                f"max_resident must be at least 2 (a fork needs two sandboxes at once), got {max_resident}"
            )
        self._inner = inner
        self._policy = Overcommit(pause_after_s, max_resident)
        self.counts = PoolCounts()
        self.forking = asyncio.Lock()
        self._sandboxes: dict[str, Sandbox] = {}
        self._makers: dict[str, Callable[[], Awaitable[Sandbox]]] = {}
        self._failures: dict[str, BaseException] = {}
        self._changed = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def scratch(self) -> Path | None:
        return self._inner.scratch

    async def probe(self) -> Capabilities:
        return await self._inner.probe()

    async def create(self, spec: SandboxSpec) -> PooledSandbox:
        return await self.open(spec.name, lambda: self._inner.create(spec))

    async def restore(self, snapshot: Snapshot, names: tuple[str, ...]) -> list[PooledSandbox]:
        """One after another, each when there is a place."""
        check_names(names, self._sandboxes)
        restored: list[PooledSandbox] = []
        try:
            for name in names:
                restored.append(await self.open(name, lambda name=name: self._restore_one(snapshot, name)))
        except BaseException:
            for sandbox in restored:
                await sandbox.close()
            raise
        return restored

    async def _restore_one(self, snapshot: Snapshot, name: str) -> Sandbox:
        return (await self._inner.restore(snapshot, (name,)))[0]

    async def drop(self, snapshot: Snapshot) -> None:
        await self._inner.drop(snapshot)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in list(self._tasks):
            await asyncio.wait({task})
        await self._inner.close()

    async def open(self, name: str, make: Callable[[], Awaitable[Sandbox]]) -> PooledSandbox:
        """Make a sandbox as soon as there is a place for it."""
        if name in self._sandboxes or name in self._makers:
            raise SandboxError(f"a sandbox named {name!r} is open already: names are unique within a backend")
        self._makers[name] = make
        try:
            async with self.present(name):
                return PooledSandbox(self, name)
        finally:
            self._makers.pop(name, None)
            if name not in self._sandboxes:
                self._failures.pop(name, None)

    async def close_one(self, name: str) -> None:
        sandbox = self._sandboxes.pop(name, None)
        self._failures.pop(name, None)
        try:
            if sandbox is not None:
                await sandbox.close()
        finally:
            await self._tell(self._policy.gone(name))

    @contextlib.asynccontextmanager
    async def present(self, name: str) -> AsyncGenerator[Sandbox]:
        """The sandbox, holding memory for as long as the block lasts."""
        if name not in self._sandboxes and name not in self._makers:
            raise SandboxError(f"sandbox {name} is closed: close was called")
        now_s = asyncio.get_running_loop().time
        begin_s = now_s()
        self._carry_out(self._policy.call(name))
        try:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self._policy.state(name) is State.BUSY or name in self._failures or not self._knows(name)
                )
            if name in self._failures:
                raise self._failures[name]
            if name not in self._sandboxes:
                raise SandboxError(f"sandbox {name} is closed: close was called")
            self.counts.waits_s.append(now_s() - begin_s)
            yield self._sandboxes[name]
        finally:
            await asyncio.shield(self._tell(self._policy.end(name, now_s())))

    def _knows(self, name: str) -> bool:
        return name in self._sandboxes or name in self._makers

    def _carry_out(self, actions: list[Action]) -> None:
        self.counts.max_resident = max(self.counts.max_resident, self._policy.num_resident)
        loop = asyncio.get_running_loop()
        for action in actions:
            task = loop.create_task(self._pause(action.name) if isinstance(action, Pause) else self._wake(action.name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._timer is not None:
            self._timer.cancel()
        due_s = self._policy.next_tick_s()
        self._timer = None if due_s == math.inf else loop.call_at(due_s, self._tick)

    def _tick(self) -> None:
        self._carry_out(self._policy.tick(asyncio.get_running_loop().time()))

    async def _tell(self, actions: list[Action]) -> None:
        """The policy's state changed: carry out what it wants, and let those who wait look."""
        self._carry_out(actions)
        async with self._changed:
            self._changed.notify_all()

    async def _pause(self, name: str) -> None:
        try:
            sandbox = self._sandboxes.get(name)
            if sandbox is not None:
                await sandbox.pause("disk")
                self.counts.num_pauses += 1
            await self._tell(self._policy.paused(name))
        except (SandboxError, OSError) as error:
            await self._fail(name, error)

    async def _wake(self, name: str) -> None:
        try:
            sandbox = self._sandboxes.get(name)
            if sandbox is not None:
                await sandbox.resume()
                self.counts.num_wakes += 1
            elif name in self._makers:
                self._sandboxes[name] = await self._makers[name]()
            await self._tell(self._policy.woken(name, asyncio.get_running_loop().time()))
        except BaseException as error:
            await self._fail(name, error)

    async def _fail(self, name: str, error: BaseException) -> None:
        """Whoever waits for it, or calls it later, is told; its place is free."""
        self._failures[name] = error
        await self._tell(self._policy.gone(name))
