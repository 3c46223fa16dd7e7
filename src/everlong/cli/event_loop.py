"""The event loop of a command, which ends although code of the user's does not want to."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from everlong.rollouts.leash import GRACE_S, never_close

T = TypeVar("T")


def run_to_the_end(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, except that it leaves behind what does not end within a grace of its cancellation.

    A harness can start tasks of its own and have them ignore theirs; `asyncio.run` would wait for them for ever.
    """
    with asyncio.Runner() as runner:
        try:
            return runner.run(main)
        finally:
            runner.run(_stop_the_rest())


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
