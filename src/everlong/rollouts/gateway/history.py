"""What has been said up to every turn, each message stored once, and which turn a request continues.

A request continues the turn whose history it repeats and goes beyond, message by message. An echo may differ where
nothing that was sampled changes by it (`Message.same_as`); the results of parallel calls may come in any order, and what
counts is the call that each answers. Everything else is a history that somebody rewrote, and continues nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from everlong.rollouts.messages import Message


@dataclass(frozen=True, slots=True)
class Continuation:
    """A request, told apart into what the session knows and what it does not."""

    turn: int
    """That the request continues; -1 where it continues none."""
    new: tuple[Message, ...]
    """What it says beyond that; results of parallel calls in the order in which the calls were sampled."""
    tools: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class _Spoken:
    """What a turn adds to the history of the turn that it continues: new messages, then its answer."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    """Of the request that began the path; a request with other tools begins another."""


@dataclass(frozen=True, slots=True)
class _Reach:
    """How far a request repeats what was said, and how it names the calls of the last answer there."""

    turn: int
    num_messages: int
    calls: dict[str, int]
    """Place in the answer of the call that has this id in the request."""


class History:
    def __init__(self) -> None:
        self._spoken: list[_Spoken] = []
        self._children: dict[int, list[int]] = {-1: []}

    def add(self, continued: Continuation, answer: Message) -> None:
        """The next turn: it answered `continued`."""
        turn = len(self._spoken)
        self._spoken.append(_Spoken((*continued.new, answer), continued.tools))
        self._children[continued.turn].append(turn)
        self._children[turn] = []

    def is_continued(self, turn: int) -> bool:
        return bool(self._children[turn])

    def find(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Continuation:
        """The turn with the longest history that the messages repeat; of equal ones the latest."""
        tools = tuple(tools)
        reaches = [_Reach(-1, 0, {})]
        for reach in reaches:
            reaches += [
                further for child in self._children[reach.turn] if (further := self._on(child, reach, messages, tools))
            ]
        found = max(reaches, key=lambda reach: (reach.num_messages, reach.turn))
        return Continuation(found.turn, tuple(in_call_order(messages[found.num_messages :], found.calls)), tools)

    def _on(
        self, turn: int, reach: _Reach, messages: Sequence[Message], tools: tuple[dict[str, Any], ...]
    ) -> _Reach | None:
        """The reach extended by a turn; None where the messages do not repeat all of it."""
        spoken = self._spoken[turn]
        end = reach.num_messages + len(spoken.messages)
        if end > len(messages) or (reach.turn < 0 and spoken.tools != tools):
            return None
        own = self._spoken[reach.turn].messages[-1] if reach.turn >= 0 else None
        calls = _repeated(spoken.messages, messages[reach.num_messages : end], own, reach.calls)
        return None if calls is None else _Reach(turn, end, calls)


def in_call_order(messages: Sequence[Message], calls: dict[str, int]) -> list[Message]:
    """The results that come first, in the order of the calls that they answer; as they came where that is not known."""
    end = next((place for place, message in enumerate(messages) if message.role != "tool"), len(messages))
    results = list(messages[:end])
    named = {message.call_id for message in results}
    if len(named) == end and named <= calls.keys():
        results.sort(key=lambda message: calls[message.call_id])
    return [*results, *messages[end:]]


def _repeated(
    mine: Sequence[Message], theirs: Sequence[Message], own: Message | None, calls: dict[str, int]
) -> dict[str, int] | None:
    """None where `theirs` is no echo of `mine`; else how the last assistant's calls are named in it.

    `own` is the assistant's message before, `calls` how theirs names its calls.
    """
    mine, theirs = in_call_order(mine, _places(own)), in_call_order(theirs, calls)
    for place, (said, echoed) in enumerate(zip(mine, theirs, strict=True)):
        if not said.same_as(echoed):
            return None
        if said.role == "assistant":
            paired = said.paired(echoed) or ()
            calls = {call.id: at for call, at in zip(echoed.tool_calls, paired, strict=True)}
            calls = calls if len(calls) == len(paired) else {}
            mine[place + 1 :] = in_call_order(mine[place + 1 :], _places(said))
            theirs[place + 1 :] = in_call_order(theirs[place + 1 :], calls)
    return calls


def _places(message: Message | None) -> dict[str, int]:
    calls = message.tool_calls if message is not None else ()
    places = {call.id: place for place, call in enumerate(calls)}
    return places if len(places) == len(calls) else {}
