"""Code of the user's that ends when it is cancelled, whether it likes to or not, and that ends nobody else.

A coroutine may catch its cancellation and go on (`except BaseException: pass` in a loop). It is given a while to clean up; then
it is abandoned: it is never run again, not even to be closed, and whoever waited for it goes on. What cannot be ended
is a loop that never waits for anything, and tasks that the coroutine started itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

GRACE_S = 5.0
"""For an agent's own clean-up after its time is over: its sandbox and its session are still there."""

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


async def leashed(start: Callable[[], Awaitable[T]], name: str, grace_s: float) -> T:
    """What the work that `start` begins gives or raises; once cancelled it ends within `grace_s` with CancelledError, or what
    the work raised meanwhile.

    A result that comes after the cancellation is not taken. Raises RuntimeError where the work cancels itself, and where it would
    end the process. `name` says who it is that had to be abandoned, or did so.
    """
    leash = _Leash(lambda: contained(start, name))
    task = asyncio.ensure_future(leash.run())
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await _wait_whatever_comes(task, grace_s)
        if not task.done():
            _LOG.warning("%s did not end within %g s of its cancellation and was abandoned", name, grace_s)
            leash.abandon()
            task.cancel()
        elif not task.cancelled() and (error := task.exception()) is not None:
            raise error from None
        raise
    if task.cancelled():
        raise RuntimeError(f"{name} raised CancelledError although nobody cancelled it")
    return task.result()


async def contained(start: Callable[[], Awaitable[T]], name: str) -> T:
    """What the work gives or raises, and RuntimeError instead of what would end the process: `sys.exit()` above all.

    The user's own Ctrl-C is none of it: it cancels the command's main task.
    """
    try:
        return await start()
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"{name} raised {error!r}, which would end the process") from error


def never_close(waiting: object) -> None:
    """Collected, a coroutine or task that waits would be closed, and closing runs it: a reference that nobody drops prevents it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(waiting))


async def _wait_whatever_comes(task: asyncio.Future[Any], timeout_s: float) -> None:
    """A second cancellation asks for what is under way already."""
    clock = asyncio.get_running_loop().time
    end_s = clock() + timeout_s
    while not task.done() and (left_s := end_s - clock()) > 0:
        try:
            await asyncio.wait({task}, timeout=left_s)
        except asyncio.CancelledError:
            continue


class _Leash(Generic[T]):
    """Stands between a task and its work, and can stop handing on what happens."""

    def __init__(self, start: Callable[[], Awaitable[T]]) -> None:
        self._start = start
        self._work: Generator[Any, Any, T] | None = None
        self._abandoned = False

    async def run(self) -> T:
        return await self

    def abandon(self) -> None:
        self._abandoned = True
        never_close(self._work)

    def __await__(self) -> Generator[Any, Any, T]:
        work = self._work = self._start().__await__()
        came: BaseException | None = None
        while True:
            try:
                waits_for = work.send(None) if came is None else work.throw(came)
            except StopIteration as end:
                return end.value
            came = None
            try:
                yield waits_for
            except BaseException as error:
                came = error
            if self._abandoned:
                raise came or asyncio.CancelledError
