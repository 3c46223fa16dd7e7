"""Sessions of a run that replays decisions: each reply brings the rows that earlier turns lack, and is refused without them."""

import msgspec
import numpy as np
import pytest
from tests.unit.rollouts.sessions import BareRenderer, FakeEngine, Journal, make_session, reply, user

from everlong.contracts.decisions import Decisions
from everlong.contracts.errors import EngineError
from everlong.rollouts.messages import Message

NAME = "experts"


def rows_at(positions):
    """The rows of tokens at these positions, which say the position before."""
    values = np.array([255 if p == 0 else p - 1 for p in positions], np.uint8)
    return Decisions(num_tokens=len(values), rows={NAME: values[:, None, None].repeat(2, 1)})


def deciding(ids, *, context_lacks=0, answer_lacks=0, blank=()):
    """An answer with a row for everything that the request does not know, but for what is left out."""

    def answer(request):
        plain, end = reply(ids)(request), len(request.prompt_ids)
        context = rows_at(range(request.num_known, end - context_lacks))
        sampled = rows_at(range(end, end + len(ids)))
        for position in blank:
            (context if position < end else sampled).rows[NAME][
                position - (request.num_known if position < end else end)
            ] = 255
        if answer_lacks:
            sampled = Decisions(num_tokens=len(ids))
        return msgspec.structs.replace(plain, columns=plain.columns.replace(decisions=sampled), context=context)

    return answer


def session_of(*answers, journal=None):
    return make_session(FakeEngine(list(answers)), BareRenderer(), journal, record=(NAME,))


async def test_rows_of_earlier_turns_and_of_the_reply_are_one_for_every_token():
    session = session_of(deciding([5, 6]), deciding([7]), deciding([30]))
    first = await session.chat([user("pr")])
    more = [user("pr"), first.message, user("ab")]
    second = await session.chat(more)
    await session.chat([*more, second.message, Message(role="user", content="y")])
    engine = session._engine
    assert [request.num_known for request in engine.requests] == [0, 4, 6]
    assert [len(request.prompt_ids) for request in engine.requests] == [2, 5, 7]
    columns = session._conversation.tree.columns(session.turns[-1])
    assert columns.decisions.rows[NAME][:, 0, 0].tolist() == [255, *range(len(columns) - 1)]


async def test_a_rewritten_history_asks_for_what_it_changed():
    session = session_of(deciding([5, 6]), deciding([7]))
    await session.chat([user("pr")])
    await session.chat([user("prab")])
    assert [request.num_known for request in session._engine.requests] == [0, 0]


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"context_lacks": 1}, "gave experts of 1 prompt tokens, and 2 are new"),
        ({"answer_lacks": True}, "no experts of 2 of the 4 tokens"),
        ({"blank": (3,)}, "no experts of 1 of the 4 tokens"),
        ({"blank": (1,)}, "no experts of 1 of the 4 tokens"),
    ],
    ids=["one row short", "none for the answer", "a hole in the answer", "a hole in the prompt"],
)
async def test_a_reply_with_rows_missing_is_refused_and_its_tokens_are_counted(lie, message):
    journal = Journal()
    session = session_of(deciding([5, 6], **lie), deciding([5]), journal=journal)
    with pytest.raises(EngineError, match=message):
        await session.chat([user("pr")])
    assert journal.facts == [("refused", 2)] and session.turns == ()
    await session.chat([user("pr")])
    assert session.turns[0].sampled.ids.tolist() == [5], "the session goes on"


async def test_a_reply_whose_rows_are_out_of_step_is_refused():
    def forged(request):
        honest = deciding([5, 6])(request)
        return msgspec.structs.replace(
            honest, context=Decisions(num_tokens=2, rows={NAME: np.zeros((3, 2, 1), np.uint8)})
        )

    with pytest.raises(EngineError, match=r"rows of shape \[3, 2, 1\] for 2 tokens"):
        await session_of(forged).chat([user("pr")])


async def test_an_engine_that_records_nothing_is_refused_and_who_does_not_ask_takes_it():
    with pytest.raises(EngineError, match="gave experts of 0 prompt tokens, and 2 are new"):
        await session_of(reply([5, 6])).chat([user("pr")])
    session = make_session(FakeEngine([reply([5, 6])]), BareRenderer())
    await session.chat([user("pr")])
    assert session._engine.requests[0].num_known == 0 and len(session.turns) == 1
