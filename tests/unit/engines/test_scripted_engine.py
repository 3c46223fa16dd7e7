"""What the fake can be told to do."""

import asyncio

import numpy as np
import pytest

from everlong.contracts.errors import EngineError
from everlong.contracts.records import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    SamplingKey,
    SamplingParams,
    decode_record,
    encode_record,
)
from everlong.engines.scripted import Fault, ScriptedEngine

TOKEN_BYTES = [bytes([i]) for i in range(100)]


def engine_of(respond):
    return ScriptedEngine(respond, token_bytes=TOKEN_BYTES, policy_version=0)


def ask(request_id="r", **params):
    key = SamplingKey(run_seed=1, episode="train-000000-000", turn=0)
    return GenerateRequest(
        request_id=request_id, key=key, prompt_ids=np.array([90, 2], np.int32), params=SamplingParams(**params)
    )


async def test_a_script_that_ends_by_itself_stops_and_one_that_is_too_long_is_cut():
    engine = engine_of(lambda request: [41, 42, 91])
    assert (await engine.generate(ask())).finish_reason is FinishReason.STOP
    cut = await engine.generate(ask(max_tokens=2))
    assert (cut.columns.ids.tolist(), cut.finish_reason) == ([41, 42], FinishReason.LENGTH)


async def test_the_script_sees_the_request():
    engine = engine_of(lambda request: [int(request.prompt_ids[-1]) + 1])
    assert (await engine.generate(ask())).columns.ids.tolist() == [3]


async def test_faults_meet_one_request_each():
    engine = engine_of(lambda request: [41])
    engine.inject(Fault.FAIL)
    with pytest.raises(EngineError, match="told to fail request a"):
        await engine.generate(ask("a"))
    assert (await engine.generate(ask("b"))).columns.ids.tolist() == [41]


async def test_a_stalled_request_answers_after_resume():
    engine = engine_of(lambda request: [41])
    engine.inject(Fault.STALL)
    task = asyncio.create_task(engine.generate(ask()))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    engine.resume()
    assert (await task).columns.ids.tolist() == [41]


async def test_a_lie_does_not_pass_as_a_record():
    engine = engine_of(lambda request: [41, 42])
    engine.inject(Fault.LIE)
    lie = await engine.generate(ask())
    with pytest.raises(ValueError, match="length of the ids"):
        decode_record(encode_record(lie), GenerateReply)


@pytest.mark.parametrize("script", [[], [100], [-1]], ids=["nothing", "unknown id", "negative id"])
async def test_a_script_that_gives_no_tokens_fails_the_request(script):
    with pytest.raises(EngineError, match="0 to 99"):
        await engine_of(lambda request: script).generate(ask())


async def test_a_script_that_breaks_fails_the_request_with_its_reason():
    def broken(request):
        raise KeyError("no such task")

    with pytest.raises(EngineError, match="no such task"):
        await engine_of(broken).generate(ask())


async def test_without_a_reader_every_version_is_there():
    engine = engine_of(lambda request: [41])
    assert (await engine.update(7)).policy_version == 7
    assert (await engine.generate(ask())).columns.versions.tolist() == [7]
