"""Sessions: the next prompt is what was seen and sampled plus what is new."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.rollouts.sessions import (
    BYTES,
    BareRenderer,
    FakeEngine,
    ToyTok,
    make_session,
    reply,
    scripted,
    tool,
    user,
)

from everlong.contracts.records import (
    FinishReason,
)
from everlong.rollouts.messages import Message, ToolCall
from everlong.rollouts.renderers.chatml import ChatML
from everlong.trajectories.tree import EpisodeTree


async def test_sampled_ids_are_never_encoded_again():
    engine = FakeEngine([reply([5, 6], [-0.1, -0.2]), reply([7])])
    session = make_session(engine, BareRenderer())
    first = await session.chat([user("pr")])
    assert (engine.requests[0].prompt_ids.tolist(), first.message.content) == ([20, 21], "ab")
    assert ToyTok().encode("prab") == [20, 21, 7], "encoding the text again would give another sequence"
    await session.chat([user("pr"), first.message, tool("ok")])
    assert engine.requests[1].prompt_ids.tolist() == [20, 21, 5, 6, 30]
    tree = EpisodeTree(session.turns)
    columns = tree.columns(session.turns[1]).slice(0, 5)
    assert columns.trainable.astype(int).tolist() == [0, 0, 1, 1, 0]
    assert columns.logprobs[2:4].tolist() == pytest.approx([-0.1, -0.2])
    assert np.isnan(columns.logprobs[[0, 1, 4]]).all()
    assert session.num_forks == 0


async def test_a_history_that_a_client_encoded_again_is_counted_and_deviates_at_a_known_token():
    session = make_session(FakeEngine([reply([5, 6]), reply([7])]), BareRenderer())
    await session.chat([user("pr")])
    await session.chat([user("prabok")])
    tree, last = EpisodeTree(session.turns), session.turns[1]
    assert tree.prompt_ids(last).tolist() == [20, 21, 7, 30]
    assert (session.num_forks, tree.departure(last)) == (1, 2)


async def test_the_separator_behind_a_turn_is_there_once_and_is_context():
    engine = FakeEngine([reply([41, 91]), reply([41, 91])])
    session = make_session(engine, ChatML(ToyTok()))
    first = await session.chat([user("y")])
    assert engine.requests[0].prompt_ids.tolist() == [90, 1, 40, 91, 10, 90, 2]
    spoken = [user("y"), first.message, tool("z")]
    await session.chat(spoken)
    second = engine.requests[1].prompt_ids.tolist()
    assert second == [90, 1, 40, 91, 10, 90, 2, 41, 91, 10, 90, 3, 42, 91, 10, 90, 2]
    assert second == ChatML(ToyTok()).render(spoken)
    columns = EpisodeTree(session.turns).columns(session.turns[1])
    assert np.flatnonzero(columns.sampled).tolist() == [7, 8, 17, 18]


async def test_a_turn_cut_at_its_limit_is_closed_once_and_as_context():
    engine = FakeEngine([reply([41, 41], reason=FinishReason.LENGTH), reply([41, 91])])
    session = make_session(engine, ChatML(ToyTok()), max_tokens=2)
    first = await session.chat([user("y")])
    assert first.finish_reason is FinishReason.LENGTH
    await session.chat([user("y"), first.message, tool("z")])
    assert engine.requests[1].prompt_ids.tolist()[7:11] == [41, 41, 91, 10]
    assert [turn.sampled.ids.tolist() for turn in session.turns] == [[41, 41], [41, 91]]
    columns = EpisodeTree(session.turns).columns(session.turns[1])
    assert (columns.ids[9], bool(columns.trainable[9])) == (91, False) and np.isnan(columns.logprobs[9])


async def test_thinking_that_a_client_drops_stays_in_the_tokens():
    engine = FakeEngine([reply([50, 60, 51, 61, 91]), reply([50, 62, 51, 63, 91])])
    session = make_session(engine, ChatML(ToyTok()))
    first = await session.chat([user("y")])
    assert (first.message.reasoning, first.message.content) == ("h", "s")
    await session.chat([user("y"), Message(role="assistant", content="s"), user("n")])
    assert engine.requests[1].prompt_ids.tolist()[7:] == [50, 60, 51, 61, 91, 10, 90, 1, 41, 91, 10, 90, 2]
    assert session.num_forks == 0
    assert EpisodeTree(session.turns).columns(session.turns[1]).num_trainable == 10


HERMES = '<tool_call>\n{"name": "bash", "arguments": {"command":"ls",  "n": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    "echo",
    [
        ToolCall(id="call-0-0", name="bash", arguments={"command": "ls", "n": 1}),
        ToolCall(id="other", name="bash", arguments={"n": 1, "command": "ls"}),
    ],
    ids=["as it came", "other id and key order"],
)
async def test_an_echo_in_other_json_continues_the_turn(echo: ToolCall):
    session = make_session(scripted(HERMES, "done"), ChatML(BYTES, "hermes"), max_tokens=200)
    await session.chat([user("u")])
    await session.chat([user("u"), Message(role="assistant", tool_calls=(echo,)), tool("ok")])
    assert [turn.parent for turn in session.turns] == [-1, 0]
    assert session.num_forks == 0


async def test_a_call_that_was_cut_at_the_limit_is_no_call_and_is_counted():
    session = make_session(scripted("$ rm -rf /tmp/x"), ChatML(BYTES), max_tokens=8)
    first = await session.chat([user("u")])
    assert (first.message.tool_calls, first.message.content, first.malformed) == ((), "$ rm -rf", True)
    await session.chat([user("u"), first.message, tool("cut")])
    assert [turn.parent for turn in session.turns] == [-1, 0], "its echo continues it"
    assert session.num_cut_calls == 2


async def test_a_turn_remembers_a_call_that_cannot_be_read_and_not_one_that_was_cut():
    session = make_session(scripted("$", "<tool_call>{no json}</tool_call>", "done"), ChatML(BYTES, "dollar"))
    first = await session.chat([user("u")])
    await session.chat([user("u"), first.message, user("again")])
    assert [turn.malformed for turn in session.turns] == [True, False], "the other syntax is text to this one"
    session = make_session(
        scripted("<tool_call>{no json}</tool_call>", "done"), ChatML(BYTES, "hermes"), max_tokens=200
    )
    first = await session.chat([user("u")])
    await session.chat([user("u"), first.message, user("again")])
    assert [turn.malformed for turn in session.turns] == [True, False]
    session = make_session(scripted("$ rm -rf /tmp/x"), ChatML(BYTES), max_tokens=8)
    assert (await session.chat([user("u")])).malformed and not session.turns[0].malformed


async def test_a_whole_call_in_a_turn_that_was_cut_behind_it_is_one():
    session = make_session(scripted(HERMES + "<tool_call>" + "x" * 99), ChatML(BYTES, "hermes"), max_tokens=110)
    reply = await session.chat([user("u")])
    assert [call.name for call in reply.message.tool_calls] == ["bash"] and reply.cut and session.num_cut_calls == 1


ECHOES = {
    "space around what the assistant said": ("assistant", "one", " one\n", True),
    "space within what the assistant said": ("assistant", "one two", "one  two", False),
    "space at the end of a question": ("user", "u", "u ", False),
    "the indentation of a tool's output": ("tool", "  x: 1", "x: 1", False),
    "a line break in the instructions": ("system", "be brief\n", "be brief", False),
}


@pytest.mark.parametrize("name", ECHOES)
async def test_an_edit_of_space_forks_unless_nothing_that_the_model_reads_changes(name: str):
    role, said, echoed, same = ECHOES[name]
    session = make_session(scripted("one two" if said == "one two" else "one", "2"), ChatML(BYTES))
    before = [] if role == "assistant" else [Message(role=role, content=said)]
    first = await session.chat([*before, user("v")])
    edited = [] if role == "assistant" else [Message(role=role, content=echoed)]
    answer = Message(role="assistant", content=echoed) if role == "assistant" else first.message
    await session.chat([*edited, user("v"), answer, user("w")])
    assert [turn.parent for turn in session.turns] == [-1, 0 if same else -1]
    assert session.num_forks == (0 if same else 1)


async def test_a_history_that_was_rewritten_forks_and_is_counted():
    session = make_session(scripted("one", "two"), ChatML(BYTES))
    await session.chat([user("u")])
    await session.chat([user("u"), Message(role="assistant", content="on"), user("v")])
    assert [turn.parent for turn in session.turns] == [-1, -1]
    assert session.num_forks == 1
    assert session.turns[0].sampled.num_trainable == 4, "what was sampled stays as it was sampled"
    assert session.turns[1].context.num_trainable == 0


async def test_tools_that_change_are_seen_by_the_model():
    engine = scripted("one", "two")
    session = make_session(engine, ChatML(BYTES, "hermes"), max_context=4000)
    tools = [{"type": "function", "function": {"name": name}} for name in ("bash", "browse")]
    first = await session.chat([user("u")], tools[:1])
    await session.chat([user("u"), first.message, user("v")], tools)
    assert "browse" in BYTES.decode(EpisodeTree(session.turns).prompt_ids(session.turns[1]).tolist())


async def test_the_same_question_again_is_a_second_answer_beside_the_first():
    session = make_session(scripted("one", "two", "three"), ChatML(BYTES))
    first = await session.chat([user("u")])
    await session.chat([user("u")])
    await session.chat([user("u"), first.message, user("v")])
    assert [turn.parent for turn in session.turns] == [-1, -1, 0]
    assert session.num_forks == 0


async def test_a_history_of_several_turns_continues_its_last_one():
    session = make_session(scripted("same"), ChatML(BYTES))
    spoken = [user("u")]
    for _ in range(4):
        spoken += [(await session.chat(spoken)).message, user("u")]
    assert [turn.parent for turn in session.turns] == [-1, 0, 1, 2]
