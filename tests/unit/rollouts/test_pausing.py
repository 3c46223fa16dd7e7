"""Sampling that is held back: turns wait, limits stand still, and an abort still gets through."""

import asyncio

import numpy as np
import pytest

from everlong.contracts.records import FinishReason, GenerateRequest, SamplingKey, SamplingParams
from everlong.engines.scripted import ScriptedEngine
from everlong.rollouts.pausing import PausableEngine, Pause


def request(name="one"):
    key = SamplingKey(run_seed=0, episode="e", turn=0)
    return GenerateRequest(request_id=name, key=key, prompt_ids=np.array([1], np.int32), params=SamplingParams())


def paused_engine():
    pause = Pause()
    engine = ScriptedEngine(lambda request: [1], token_bytes=[b"a", b"b"], policy_version=3)
    return pause, engine, PausableEngine(engine, pause)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_no_turn_begins_while_it_is_paused_and_then_it_has_the_version_that_came():
    pause, engine, front = paused_engine()
    pause.pause()
    answer = asyncio.ensure_future(front.generate(request()))
    await settle()
    assert not answer.done() and (await engine.status()).num_running == 0
    await front.update(4)
    pause.resume()
    assert (await answer).columns.versions.tolist() == [4]


async def test_a_request_that_waits_can_be_aborted_and_has_sampled_nothing():
    pause, _, front = paused_engine()
    pause.pause()
    one, other = (asyncio.ensure_future(front.generate(request(name))) for name in ("one", "other"))
    await settle()
    await front.abort(("one", "unknown"))
    reply = await one
    assert (reply.finish_reason, len(reply.columns), reply.request_id) == (FinishReason.ABORT, 0, "one")
    assert not other.done()
    pause.resume()
    assert (await other).finish_reason is FinishReason.STOP


async def test_a_request_whose_caller_is_gone_is_forgotten():
    pause, engine, front = paused_engine()
    pause.pause()
    waiting = asyncio.ensure_future(front.generate(request()))
    await settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    pause.resume()
    await settle()
    assert (await engine.status()).metrics["replies"] == 0


@pytest.mark.looptime(start=100.0)
async def test_a_time_limit_stands_still_while_sampling_is_paused():
    pause, ended = Pause(), []

    async def limited(name, seconds):
        try:
            async with asyncio.timeout(seconds) as limit:
                with pause.spares(limit):
                    await asyncio.sleep(1e6)
        except TimeoutError:
            ended.append((name, asyncio.get_running_loop().time()))

    early = asyncio.ensure_future(limited("early", 10))
    await asyncio.sleep(4)
    pause.pause()
    pause.pause()
    await asyncio.sleep(500)
    late = asyncio.ensure_future(limited("late", 3))
    await asyncio.sleep(500)
    assert ended == []
    pause.resume()
    await asyncio.gather(early, late)
    assert ended == [("late", 1107.0), ("early", 1110.0)]


@pytest.mark.looptime
async def test_a_limit_that_is_over_before_the_pause_is_left_alone():
    pause = Pause()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1) as limit:
            with pause.spares(limit):
                try:
                    await asyncio.sleep(5)
                finally:
                    pause.pause()
                    pause.resume()
    pause.pause()
    assert pause.paused
