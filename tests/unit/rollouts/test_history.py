"""Which turn a request continues, and what of it is new, whatever the agent made of its echo."""

from __future__ import annotations

import pytest

from everlong.rollouts.gateway.history import History
from everlong.rollouts.gateway.transcripts import canonical
from everlong.rollouts.messages import Message, ToolCall

LS = ToolCall(id="call-0-0", name="bash", arguments={"command": "ls", "n": 1})
CAT = ToolCall(id="call-0-1", name="bash", arguments={"command": "cat"})
ANSWER = Message(role="assistant", content="look", reasoning="hm", tool_calls=(LS, CAT))
TOOLS = ({"type": "function", "function": {"name": "bash"}},)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def system(text: str) -> Message:
    return Message(role="system", content=text)


def says(content: str = "look", *calls: ToolCall, reasoning: str = "") -> Message:
    return Message(role="assistant", content=content, tool_calls=calls, reasoning=reasoning)


def result(call: ToolCall, text: str) -> Message:
    return Message(role="tool", content=text, call_id=call.id)


def renamed(call: ToolCall, ident: str) -> ToolCall:
    return ToolCall(id=ident, name=call.name, arguments=call.arguments)


def one_turn() -> History:
    history = History()
    history.add(history.find([user("u")], TOOLS), ANSWER)
    return history


ECHOES = {
    "word for word": ANSWER,
    "without its thinking": says("look", LS, CAT),
    "with space around": says("\nlook ", LS, CAT),
    "with its calls the other way round": says("look", CAT, LS),
    "with new ids": says("look", renamed(LS, "a"), renamed(CAT, "b")),
    "with numbers as another language writes them": says(
        "look", ToolCall(id="x", name="bash", arguments={"n": 1.0, "command": "ls"}), CAT
    ),
    "with the first of its calls only": says("look", LS),
}
REWRITTEN = {
    "other words": says("looked", LS, CAT),
    "other thinking": says("look", LS, CAT, reasoning="hm, well"),
    "another argument": says("look", ToolCall(id=LS.id, name="bash", arguments={"command": "ls"}), CAT),
    "true for 1": says("look", ToolCall(id=LS.id, name="bash", arguments={"command": "ls", "n": True}), CAT),
    "a call twice": says("look", LS, LS),
    "a call more": says("look", LS, CAT, CAT),
    "none of its calls": says("look"),
    "another role": user("look"),
}


@pytest.mark.parametrize("name", ECHOES)
def test_an_echo_that_means_the_same_continues_its_turn(name: str):
    found = one_turn().find([user("u"), ECHOES[name], user("v")], TOOLS)
    assert (found.turn, found.new) == (0, (user("v"),))


@pytest.mark.parametrize("name", REWRITTEN)
def test_an_answer_that_was_rewritten_continues_nothing(name: str):
    said = (user("u"), REWRITTEN[name], user("v"))
    found = one_turn().find(said, TOOLS)
    assert (found.turn, found.new) == (-1, said)


def test_a_request_with_other_tools_begins_another_path():
    assert one_turn().find([user("u"), ANSWER, user("v")], ()).turn == -1


def test_results_of_parallel_calls_are_in_the_order_of_the_calls_that_were_sampled():
    a, b = renamed(LS, "a"), renamed(CAT, "b")
    found = one_turn().find([user("u"), says("look", b, a), result(b, "text"), result(a, "names"), user("v")], TOOLS)
    assert [message.content for message in found.new] == ["names", "text", "v"]


def test_results_that_come_in_another_order_the_next_time_are_the_same_results():
    history = one_turn()
    history.add(history.find([user("u"), ANSWER, result(CAT, "text"), result(LS, "names")], TOOLS), says("done"))
    again = history.find([user("u"), ANSWER, result(LS, "names"), result(CAT, "text"), says("done"), user("v")], TOOLS)
    assert (again.turn, again.new) == (1, (user("v"),))
    swapped = history.find(
        [user("u"), ANSWER, result(CAT, "names"), result(LS, "text"), says("done"), user("v")], TOOLS
    )
    assert swapped.turn == 0, "each result stands under the other's call: that is another history behind the first turn"


def test_results_without_ids_keep_their_order():
    history = one_turn()
    results = [Message(role="tool", content=text) for text in ("text", "names")]
    history.add(history.find([user("u"), ANSWER, *results], TOOLS), says("done"))
    assert history.find([user("u"), ANSWER, *results, says("done"), user("v")], TOOLS).turn == 1
    assert history.find([user("u"), ANSWER, *results[::-1], says("done"), user("v")], TOOLS).turn == 0


def test_two_equal_calls_are_told_apart_by_their_ids():
    first, second = renamed(LS, "call-0-0"), renamed(LS, "call-0-1")
    history = History()
    history.add(history.find([user("u")], TOOLS), says("", first, second))
    found = history.find([user("u"), says("", second, first), result(second, "2"), result(first, "1")], TOOLS)
    assert [message.content for message in found.new] == ["1", "2"]


def test_the_longest_history_wins_and_of_equal_ones_the_latest():
    history = History()
    for _ in range(2):
        history.add(history.find([user("u")], ()), says("a"))
    history.add(history.find([user("u"), says("a"), user("v")], ()), says("b"))
    assert history.find([user("u"), says("a"), user("w")], ()).turn == 1
    assert history.find([user("u"), says("a"), user("v"), says("b"), user("w")], ()).turn == 2


def test_an_answer_that_is_repeated_and_nothing_more_is_continued_with_nothing_new():
    found = one_turn().find([user("u"), ANSWER], TOOLS)
    assert (found.turn, found.new) == (0, ())


def test_a_history_that_a_client_wrote_itself_is_compared_like_any_other():
    written = [user("u"), says("", CAT, LS), result(LS, "names"), result(CAT, "text")]
    history = History()
    history.add(history.find(written, ()), says("done"))
    turned = [user("u"), says("", LS, CAT), result(LS, "names"), result(CAT, "text"), says("done"), user("v")]
    assert history.find(turned, ()).turn == 0


# The form of a transcript --------------------------------------------------------------------------------------------

FOLDS = {
    "those at the start are one": (
        [system("a"), system("b"), user("u")],
        [system("a\n\nb"), user("u")],
    ),
    "a later one joins the user's message before it": (
        [user("u"), system("r")],
        [user("u\n<system-reminder>\nr\n</system-reminder>")],
    ),
    "or the one behind it": (
        [says("a"), system("r"), user("u"), user("v")],
        [says("a"), user("<system-reminder>\nr\n</system-reminder>\nu"), user("v")],
    ),
    "or is a message of its own": (
        [says("", LS), result(LS, "x"), system("r"), says("a")],
        [says("", LS), result(LS, "x"), user("<system-reminder>\nr\n</system-reminder>"), says("a")],
    ),
}
SPLITS = {
    "thinking, words and calls": [says("", reasoning="hm"), says("look"), says("", LS), says("", CAT)],
    "words and calls": [says("look", reasoning="hm"), says("", LS, CAT)],
}


@pytest.mark.parametrize("name", FOLDS)
def test_system_messages_are_folded(name: str):
    before, after = FOLDS[name]
    assert list(canonical(before)) == after
    assert canonical(after) == canonical(before), "an agent that folds by itself means the same"


@pytest.mark.parametrize("name", SPLITS)
def test_the_parts_of_one_answer_are_joined(name: str):
    assert list(canonical([user("u"), *SPLITS[name], user("v")])) == [user("u"), ANSWER, user("v")]


def test_two_answers_stay_two():
    both = (user("u"), says("a"), says("b"))
    assert canonical(both) == both
