"""Thinking in the history: kept in the tokens, or cut out of them at a user's message, and never encoded again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tests.unit.rollouts.sessions import FakeEngine, ToyTok, make_session, reply, tool, user

from everlong.rollouts.messages import Message
from everlong.rollouts.renderers.chatml import ChatML
from everlong.rollouts.renderers.tokenizers import ByteTokenizer
from everlong.trajectories.tree import EpisodeTree

BYTES = ByteTokenizer()
END = BYTES.special("<|im_end|>")
FIRST = [90, 1, 40, 91, 10, 90, 2]
SAID = Message(role="assistant", content="s")


def text_of(ids: Sequence[int]) -> str:
    return BYTES.decode(ids)


async def two_turns(thinking: str):
    """`y`, thought and answered; then `n`, thought and answered."""
    engine = FakeEngine([reply([50, 60, 51, 61, 91]), reply([50, 62, 51, 63, 91])])
    session = make_session(engine, ChatML(ToyTok()), thinking=thinking)
    await session.chat([user("y")])
    await session.chat([user("y"), SAID, user("n")])
    return engine, session


async def test_thinking_that_is_stripped_leaves_a_branch_in_which_nothing_was_encoded_again():
    engine, session = await two_turns("strip_and_branch")
    second = engine.requests[1].prompt_ids.tolist()
    assert second == [*FIRST, 61, 91, 10, 90, 1, 41, 91, 10, 90, 2]
    tree = EpisodeTree(session.turns)
    first, last = (tree.columns(turn) for turn in session.turns)
    assert np.flatnonzero(first.trainable).tolist() == [7, 8, 9, 10, 11]
    assert np.flatnonzero(last.trainable).tolist() == [17, 18, 19, 20, 21]
    assert not last.sampled[7:9].any(), "the words that stayed belong to the turn that sampled them"
    assert (session.num_stripped, session.num_forks, session.turns[1].continues) == (1, 0, 0)


async def test_thinking_that_is_kept_makes_one_path_in_which_every_sampled_token_trains():
    engine, session = await two_turns("keep")
    assert engine.requests[1].prompt_ids.tolist()[:12] == [*FIRST, 50, 60, 51, 61, 91]
    assert EpisodeTree(session.turns).columns(session.turns[1]).num_trainable == 10
    assert (session.num_stripped, session.num_forks) == (0, 0)


async def test_thinking_stays_while_tools_answer_and_goes_with_the_users_next_message():
    engine = FakeEngine([reply([50, 60, 51, 61, 91])] * 4)
    session = make_session(engine, ChatML(ToyTok()), thinking="strip_and_branch")
    spoken = [user("y")]
    for message in (tool("z"), user("n"), user("y")):
        await session.chat(spoken)
        spoken += [SAID, message]
    await session.chat(spoken)
    thoughts = [request.prompt_ids.tolist().count(60) for request in engine.requests]
    assert thoughts == [0, 1, 0, 0] and session.num_stripped == 2
    assert [turn.parent for turn in session.turns] == [-1, 0, -1, -1]
    assert sum(turn.sampled.num_trainable for turn in session.turns) == 20


async def test_an_answer_that_did_not_end_its_thinking_has_nothing_to_be_cut_out():
    engine = FakeEngine([reply([50, 60, 91]), reply([41, 91])])
    session = make_session(engine, ChatML(ToyTok()), thinking="strip_and_branch")
    first = await session.chat([user("y")])
    await session.chat([user("y"), first.message, user("n")])
    assert engine.requests[1].prompt_ids.tolist()[7:10] == [50, 60, 91] and session.num_stripped == 0


@pytest.mark.parametrize(
    "said, cut, separable",
    [
        ("<think>hm</think>\n\n so", "<think>hm</think>\n\n ", True),
        (" <think></think>so", " <think></think>", True),
        ("<think>hm</think>", "<think>hm</think>", True),
        ("<think>hm", "<think>hm", False),
        ("so <think>hm</think>", "", True),
        ("so", "", True),
    ],
)
def test_thinking_is_what_stands_before_the_answer_with_its_tags(said: str, cut: str, separable: bool):
    ids = [*BYTES.encode(said), END]
    found = ChatML(BYTES).thinking(ids)
    expected = len(ids) if not separable else len(cut)
    assert (found.num_opened, found.num_sampled, found.separable) == (0, expected, separable)


def test_a_token_that_ends_thinking_and_begins_the_answer_is_not_cut_in_two():
    class Joined(ToyTok):
        PIECES = {**ToyTok.PIECES, "</think>s": 70}

    found = ChatML(Joined()).thinking([50, 60, 70, 91])
    assert (found.num_sampled, found.separable) == (3, False)


def test_a_prompt_that_opens_thinking_and_an_answer_that_ends_it_have_one_pair_of_tags():
    renderer = ChatML(BYTES, opens_thinking=True)
    prompt = renderer.render([Message(role="user", content="u")])
    sampled = [*BYTES.encode("hm</think>\n$ ls"), END]
    whole = text_of([*prompt, *sampled])
    assert whole.count("<think>") == whole.count("</think>") == 1
    assert whole == "user\nu\nassistant\n<think>\nhm</think>\n$ ls"
    parsed = renderer.parse(sampled, 0)
    assert (parsed.reasoning, parsed.tool_calls[0].arguments) == ("hm", {"command": "ls"})
    assert renderer.thinking(sampled) == renderer.thinking(sampled[:11])
    assert text_of(renderer.bridge(END, [Message(role="tool", content="x")])).endswith("assistant\n<think>\n")


def test_an_oracle_ends_the_thinking_that_its_prompt_opened():
    renderer = ChatML(BYTES, opens_thinking=True)
    parsed = renderer.parse(renderer.answer(Message(role="assistant", content="done")), 0)
    assert (parsed.reasoning, parsed.content) == ("", "done")


async def test_stripping_takes_the_opening_out_of_the_prompt_too():
    renderer = ChatML(ToyTok(), opens_thinking=True)
    engine = FakeEngine([reply([60, 51, 61, 91]), reply([60, 51, 61, 91])])
    session = make_session(engine, renderer, thinking="strip_and_branch")
    await session.chat([user("y")])
    assert engine.requests[0].prompt_ids.tolist() == [*FIRST, 50, 10]
    await session.chat([user("y"), SAID, user("n")])
    assert engine.requests[1].prompt_ids.tolist() == [*FIRST, 61, 91, 10, 90, 1, 41, 91, 10, 90, 2, 50, 10]
