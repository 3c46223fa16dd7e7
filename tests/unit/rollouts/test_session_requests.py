"""Sessions: what the engine is asked, how often, and what is refused before it is."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.rollouts.sessions import BYTES, BareRenderer, FakeEngine, make_session, reply, scripted, tool, user

from everlong.contracts.errors import WorkerDied
from everlong.contracts.records import (
    GenerateReply,
    GenerateRequest,
    SamplingParams,
    Turn,
    decode_record,
    encode_record,
)
from everlong.engines.scripted import Fault
from everlong.rollouts.gateway.session import ContextFull, TurnLimit
from everlong.rollouts.renderers.chatml import ChatML


async def test_a_request_is_shortened_to_what_the_context_has_left():
    engine = FakeEngine([reply([5])])
    session = make_session(engine, BareRenderer(), max_tokens=200, max_context=1000)
    await session.chat([user("p" * 900)])
    assert len(engine.requests[0].prompt_ids) == 900 and engine.requests[0].params.max_tokens == 100


@pytest.mark.parametrize("length, fits", [(999, True), (1000, False), (5000, False)])
async def test_a_prompt_that_leaves_no_token_is_context_full(length: int, fits: bool):
    engine = FakeEngine([reply([5])])
    session = make_session(engine, BareRenderer(), max_context=1000)
    if fits:
        await session.chat([user("p" * length)])
        assert session.refusal is None
    else:
        with pytest.raises(ContextFull, match=str(length)):
            await session.chat([user("p" * length)])
        assert isinstance(session.refusal, ContextFull)
    assert len(engine.requests) == fits


async def test_sampling_comes_from_the_run_and_its_randomness_from_the_episode_and_turn():
    engine = FakeEngine([reply([5]), reply([5])])
    session = make_session(engine, BareRenderer(), max_tokens=9)
    await session.chat([user("p")])
    await session.chat([user("r")])
    first, second = engine.requests
    assert first.params == second.params == SamplingParams(max_tokens=9)
    assert (first.key.run_seed, first.key.episode, first.key.turn) == (7, "train-000004-002", 0)
    assert (second.key.turn, second.request_id) == (1, "train-000004-002.1.1")


async def test_an_empty_chat_is_refused_and_changes_nothing():
    session = make_session(FakeEngine([]), BareRenderer())
    with pytest.raises(ValueError, match="at least one message"):
        await session.chat([])
    assert session.refusal is None


async def test_a_session_makes_no_more_calls_than_it_may():
    engine = FakeEngine([reply([5])] * 3)
    session = make_session(engine, BareRenderer(), max_turns=2)
    await session.chat([user("p")])
    await session.chat([user("p")])
    with pytest.raises(TurnLimit, match="2"):
        await session.chat([user("p")])
    assert len(engine.requests) == 2


async def test_a_worker_that_died_is_no_engine_error():
    def die(request: GenerateRequest) -> GenerateReply:
        raise WorkerDied("gone")

    session = make_session(FakeEngine([die]), BareRenderer())
    with pytest.raises(WorkerDied):
        await session.chat([user("p")])
    assert isinstance(session.refusal, WorkerDied)


async def test_turns_of_one_session_never_overlap():
    engine = scripted("one", "two")
    engine.inject(Fault.STALL)
    session = make_session(engine, ChatML(BYTES))
    calls = [asyncio.create_task(session.chat([user("u")])) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert (await engine.status()).num_running == 1
    engine.resume()
    assert [answer.turn for answer in await asyncio.gather(*calls)] == [0, 1]


async def test_turns_keep_every_id_and_logprob_on_the_wire():
    session = make_session(scripted("$ ls", "é done"), ChatML(BYTES))
    first = await session.chat([user("u")])
    await session.chat([user("u"), first.message, tool("a\0b 🦊")])
    for turn in session.turns:
        again = decode_record(encode_record(turn), Turn)
        assert again.context == turn.context and again.sampled == turn.sampled
        assert (again.parent, again.request_id, again.finish_reason) == (
            turn.parent,
            turn.request_id,
            turn.finish_reason,
        )
