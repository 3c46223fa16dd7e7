"""A command's loop ends with its main task, and with nothing else but the user's Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from everlong.cli.event_loop import run_to_the_end


@pytest.fixture
def heard_interrupt() -> Iterator[None]:
    """Ctrl-C as on a terminal. What a shell starts in the background has it ignored, and so would its tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def exiting(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()], ids=["exit", "interrupt"])
def test_a_task_of_somebodys_own_that_exits_ends_itself_alone(error: BaseException) -> None:
    async def main() -> str:
        with pytest.raises(type(error)):
            await asyncio.gather(exiting(error))
        lost = asyncio.create_task(exiting(error))
        await asyncio.wait({lost})
        asyncio.get_running_loop().call_soon(sys.exit, 0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return "its result"

    assert run_to_the_end(main()) == "its result"


@pytest.mark.parametrize("error", [KeyError("its own"), SystemExit(3)], ids=["error", "exit"])
def test_what_the_command_itself_raises_goes_on_outwards(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        run_to_the_end(exiting(error))
    assert raised.value is error


@pytest.mark.usefixtures("heard_interrupt")
def test_the_users_interrupt_ends_the_command_although_its_own_code_exits_meanwhile() -> None:
    """The first cancels the main task, which may clean up."""
    ended = []

    async def main() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(3600)
        finally:
            asyncio.get_running_loop().call_soon(sys.exit, 0)
            await asyncio.sleep(0.01)
            ended.append(True)

    with pytest.raises((KeyboardInterrupt, asyncio.CancelledError)):
        run_to_the_end(main())
    assert ended == [True]


def test_a_task_that_exits_when_it_is_cleared_away_costs_no_result() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            sys.exit(0)

    kept = []

    async def main() -> str:
        kept.append(asyncio.create_task(stubborn()))
        await asyncio.sleep(0)
        return "its result"

    assert run_to_the_end(main()) == "its result"
