"""Work that is cancelled ends, whatever it thinks of it; the clock is the loop's and never waited for."""

import asyncio
from functools import partial

import pytest

from everlong.rollouts.leash import leashed

GRACE_S = 0.05
CLEAN_S = 60.0
"""Never over: the work ends."""


async def test_what_the_work_gives_or_raises_is_handed_on():
    async def work(fails):
        await asyncio.sleep(0)
        if fails:
            raise KeyError("its own")
        return "its result"

    assert await leashed(partial(work, False), "it", GRACE_S) == "its result"
    with pytest.raises(KeyError, match="its own"):
        await leashed(partial(work, True), "it", GRACE_S)


async def cancel(task, times=1):
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)


async def test_work_cleans_up_before_its_cancellation_goes_on():
    cleaned = []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    task = asyncio.create_task(leashed(work, "it", CLEAN_S))
    await cancel(task)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == [True]


async def test_what_breaks_during_the_clean_up_is_raised_and_a_late_result_is_not_taken():
    async def work(breaks):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if breaks:
                raise OSError("broken") from None
        return "too late"

    for breaks, expected in ((True, OSError), (False, asyncio.CancelledError)):
        task = asyncio.create_task(leashed(partial(work, breaks), "it", CLEAN_S))
        await cancel(task)
        with pytest.raises(expected):
            await task


@pytest.mark.parametrize("times", [1, 3], ids=["asked-once", "asked-again"])
async def test_work_that_swallows_its_cancellation_is_never_run_again(caplog, times):
    rounds = []

    async def work():
        while True:
            rounds.append(1)
            try:  # noqa: SIM105
                await asyncio.sleep(3600)
            except BaseException:
                pass

    task = asyncio.create_task(leashed(work, "the harness of g0-a1", GRACE_S))
    await cancel(task, times)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "the harness of g0-a1 did not end within 0.05 s of its cancellation and was abandoned" in caplog.text
    seen = len(rounds)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(rounds) == seen and asyncio.all_tasks() == {asyncio.current_task()}


async def test_work_that_would_spin_without_ever_waiting_does_not_stop_the_loop():
    gone = asyncio.Event()

    async def call():
        if gone.is_set():
            raise ConnectionError("closed")
        await asyncio.sleep(3600)

    async def work():
        while True:
            try:  # noqa: SIM105
                await call()
            except BaseException:
                pass

    task = asyncio.create_task(leashed(work, "it", GRACE_S))
    await cancel(task)
    with pytest.raises(asyncio.CancelledError):
        await task
    gone.set()
    await asyncio.sleep(0)


async def test_a_time_limit_around_it_is_a_time_limit():
    async def work():
        while True:
            try:  # noqa: SIM105
                await asyncio.sleep(3600)
            except BaseException:
                pass

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01) as limit:
            await leashed(work, "it", GRACE_S)
    assert limit.expired()


async def test_work_that_cancels_itself_is_an_error_of_its_own_and_no_cancellation():
    async def work():
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="it raised CancelledError although nobody cancelled it"):
        await leashed(work, "it", CLEAN_S)


@pytest.mark.filterwarnings("error")
async def test_work_that_was_cancelled_before_it_began_is_never_begun():
    begun = []

    async def work():
        begun.append(1)

    task = asyncio.create_task(leashed(work, "it", CLEAN_S))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert begun == []
