"""Sessions: every sampled token is accounted for, whatever happens to the call."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from tests.unit.rollouts.sessions import Answer, BareRenderer, FakeEngine, Journal, ToyTok, make_session, reply, user

from everlong.contracts.errors import EngineError, RequestAborted, StaleWeights
from everlong.contracts.records import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
)
from everlong.contracts.tokens import STREAMS, KeptSets
from everlong.engines.scripted import ScriptedEngine
from everlong.rollouts.gateway.session import SessionClosed


async def test_a_turn_reaches_the_journal_before_the_agent_sees_it():
    written = asyncio.Event()
    journal = Journal(write=written.wait)
    session = make_session(FakeEngine([reply([5, 6])]), BareRenderer(), journal)
    call = asyncio.create_task(session.chat([user("p")]))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not call.done() and session.turns == ()
    written.set()
    assert (await call).turn == 0
    assert journal.facts == [("turn 0", 2)]


def forged(**streams: np.ndarray | KeptSets) -> Answer:
    """Columns that no constructor would make."""

    def answer(request: GenerateRequest) -> GenerateReply:
        honest = reply([5, 6])(request)
        for name, values in streams.items():
            object.__setattr__(honest.columns, name, values)
        return honest

    return answer


def nan(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


LIES: dict[str, tuple[Answer, str]] = {
    "an id beyond the vocabulary": (reply([5, 92]), "92"),
    "a negative id": (reply([-1, 5]), "-1"),
    "a missing logprob": (forged(logprobs=nan(-0.1)), "length"),
    "a logprob that is none": (forged(logprobs=nan(-0.1, np.nan)), "logprobs"),
    "a positive logprob": (forged(logprobs=nan(-0.1, 0.5)), "logprobs"),
    "a kept set without its token": (forged(kept=KeptSets.from_rows([[5], [7, 9]])), "kept set of token 1 lacks"),
    "tokens that were not sampled": (forged(sampled=np.array([True, False])), "not sampled"),
    "no policy version": (forged(versions=np.full(2, -1, np.int32)), "version"),
    "no temperature": (forged(temperatures=nan(np.nan, np.nan)), "temperature"),
    "another request": (lambda r: msgspec.structs.replace(reply([5, 6])(r), request_id="other"), "other"),
    "more than was asked": (reply([5] * 65), "65"),
    "fewer ids than it reported": (lambda r: msgspec.structs.replace(reply([5, 6])(r), num_reported=3), "reported 3"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_reply_that_cannot_be_is_refused_and_its_tokens_are_discarded(lie: str):
    answer, word = LIES[lie]
    journal = Journal()
    session = make_session(FakeEngine([answer, reply([5])]), BareRenderer(), journal)
    with pytest.raises(EngineError, match=word):
        await session.chat([user("p")])
    num_tokens = 65 if lie == "more than was asked" else 2
    assert journal.facts == [("refused", num_tokens)]
    assert (session.num_discarded, session.turns) == (num_tokens, ())
    await session.chat([user("p")])
    assert [turn.sampled.ids.tolist() for turn in session.turns] == [[5]], "the session goes on"


async def test_a_retry_starts_every_stream_anew():
    cut = reply([5, 6, 7], [-0.1, -0.2, -0.3])
    aborted = lambda request: msgspec.structs.replace(cut(request), finish_reason=FinishReason.ABORT)  # noqa: E731
    session = make_session(FakeEngine([aborted, reply([8, 9], [-0.4, -0.5])]), BareRenderer())
    with pytest.raises(RequestAborted):
        await session.chat([user("p")])
    await session.chat([user("p")])
    (turn,) = session.turns
    assert [len(getattr(turn.sampled, stream)) for stream in (*STREAMS, "kept")] == [2] * (len(STREAMS) + 1)
    assert turn.sampled.logprobs.tolist() == pytest.approx([-0.4, -0.5])
    assert session.num_discarded == 3


async def test_a_reply_without_tokens_is_an_engine_failure():
    session = make_session(FakeEngine([reply([])]), BareRenderer())
    with pytest.raises(EngineError, match="sampled nothing"):
        await session.chat([user("p")])


async def test_a_request_the_engine_calls_impossible_is_an_engine_failure():
    engine = ScriptedEngine(lambda request: [5], token_bytes=ToyTok().token_bytes(), max_context=10, policy_version=3)
    session = make_session(engine, BareRenderer(), max_context=1000)
    with pytest.raises(EngineError, match="context of 10"):
        await session.chat([user("p" * 50)])


async def test_an_aborted_turn_is_discarded():
    journal = Journal()
    session = make_session(FakeEngine([reply([5, 6, 5], reason=FinishReason.ABORT)]), BareRenderer(), journal)
    with pytest.raises(RequestAborted, match="3 tokens"):
        await session.chat([user("p")])
    assert journal.facts == [("aborted", 3)] and session.num_discarded == 3


async def test_what_a_cancelled_call_had_sampled_is_discarded_not_lost():
    journal, engine = Journal(), FakeEngine([reply([5, 6, 5], reason=FinishReason.ABORT), reply([6])], held=True)
    session = make_session(engine, BareRenderer(), journal)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await session.chat([user("p")])
    assert journal.facts == [("aborted", 3)] and session.num_discarded == 3
    await session.chat([user("p")])
    assert journal.facts[1:] == [("turn 0", 1)]


async def test_a_call_cancelled_before_it_began_still_reaches_the_engine_in_order():
    journal, engine = Journal(), FakeEngine([reply([5], reason=FinishReason.ABORT)], held=True)
    session = make_session(engine, BareRenderer(), journal)
    call = asyncio.create_task(session.chat([user("p")]))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert len(engine.requests) == 1 and engine.aborted.is_set()
    assert journal.facts == [("aborted", 1)]


async def test_an_engine_that_ignores_the_abort_is_not_waited_for_longer_than_the_grace(monkeypatch):
    monkeypatch.setattr("everlong.rollouts.gateway.session.ABORT_GRACE_S", 0.01)
    engine = FakeEngine([reply([5])], held=True)
    engine.abort = lambda request_ids: asyncio.sleep(3600)
    journal = Journal()
    session = make_session(engine, BareRenderer(), journal)
    call = asyncio.create_task(session.chat([user("p")]))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, 10)
    assert session.turns == () and not session.lock.locked()
    assert journal.facts == [("uncounted, engine_silent", 64)], "nobody knows how many, and that is said"
    assert (session.num_uncounted, session.num_discarded) == (1, 0)


@pytest.mark.parametrize("cancelled", [False, True], ids=["while it is awaited", "while it is cancelled"])
async def test_a_call_whose_engine_breaks_is_told_as_uncounted(cancelled: bool):
    def breaks(request: GenerateRequest) -> GenerateReply:
        raise EngineError("the engine broke in a step")

    journal = Journal()
    session = make_session(FakeEngine([breaks], held=cancelled), BareRenderer(), journal)
    call = asyncio.create_task(session.chat([user("p")]))
    for _ in range(5):
        await asyncio.sleep(0)
    if cancelled:
        call.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else EngineError):
        await call
    assert journal.facts == [("uncounted, engine_failure", 64)] and session.num_uncounted == 1


@pytest.mark.parametrize("error", [ValueError("too long"), StaleWeights("pull 3 first")], ids=["refused", "stale"])
async def test_a_request_that_never_ran_leaves_nothing_uncounted(error: Exception):
    def refuses(request: GenerateRequest) -> GenerateReply:
        raise error

    journal = Journal()
    with pytest.raises(EngineError):
        await make_session(FakeEngine([refuses]), BareRenderer(), journal).chat([user("p")])
    assert journal.facts == []


async def test_a_cancellation_while_the_journal_writes_leaves_tree_and_journal_agreeing():
    written = asyncio.Event()
    journal = Journal(write=written.wait)
    session = make_session(FakeEngine([reply([5, 6])]), BareRenderer(), journal)
    call = asyncio.create_task(session.chat([user("p")]))
    for _ in range(20):
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.sleep(0)
    call.cancel()
    written.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert journal.facts == [("turn 0", 2)] and len(session.turns) == 1


async def test_closing_ends_a_call_in_flight_and_accounts_for_it():
    journal, engine = Journal(), FakeEngine([reply([5, 6], reason=FinishReason.ABORT)], held=True)
    session = make_session(engine, BareRenderer(), journal)
    calls = [asyncio.create_task(session.chat([user("p")])) for _ in range(2)]
    await asyncio.sleep(0.01)
    await session.close()
    assert journal.facts == [("aborted", 2)]
    assert [type(error) for error in await asyncio.gather(*calls, return_exceptions=True)] == [SessionClosed] * 2
    assert len(engine.requests) == 1
    await session.close()
