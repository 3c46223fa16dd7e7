"""The event loop of a command, which ends although code of the user's does not want to, and does not end because it does."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from everlong.rollouts.leash import GRACE_S, never_close

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


def run_to_the_end(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, with two exceptions.

    It leaves behind what does not end within a grace of its cancellation: a harness can start tasks of its own and have them
    ignore theirs; `asyncio.run` would wait for them for ever. And where such a task calls `sys.exit()` or raises what else
    stops the loop, whoever waits for that task hears of it, and the loop goes on. The first Ctrl-C cancels `main`, which
    then may clean up, and the next one ends it.
    """
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        task = loop.create_task(main)
        try:
            with _interrupts(task):
                _complete(loop, task)
            return task.result()
        finally:
            _complete(loop, loop.create_task(_stop_the_rest()))


@contextmanager
def _interrupts(task: asyncio.Task[Any]) -> Generator[None]:
    """Ctrl-C for the task, except where something else answers it. Raises KeyboardInterrupt where it ended the task."""
    interrupted = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal interrupted
        if interrupted or task.done():
            raise _Interrupted
        interrupted = True
        task.cancel()
        task.get_loop().call_soon_threadsafe(lambda: None)  # it may be waiting for its sockets

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, before)
    if interrupted and task.cancelled():
        raise KeyboardInterrupt


class _Interrupted(KeyboardInterrupt):
    """The user's, and nobody else's."""


def _complete(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    """Run the loop until the task is done, whatever others raise through it."""
    while not task.done():
        try:
            loop.run_until_complete(task)
        except _Interrupted:
            raise
        except BaseException as error:
            if not task.done():
                _LOG.warning(
                    "a task that is not the command's own raised %r, which would have ended the process", error
                )


async def _stop_the_rest() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    if not rest:
        return
    for task in rest:
        task.cancel()
    _, deaf = await asyncio.wait(rest, timeout=GRACE_S)
    for task in deaf:
        asyncio._unregister_task(task)  # the loop's own close would wait for it
        never_close(task)
