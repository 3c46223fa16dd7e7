"""Chat messages as renderers, sessions and harnesses pass them: the common ground of all dialects."""

from __future__ import annotations

from typing import Any

from everlong.contracts.records import Record


class ToolCall(Record, frozen=True, kw_only=True):
    """Example: ToolCall(id="call-0-0", name="bash", arguments={"command": "ls"})"""

    id: str = ""
    name: str
    arguments: dict[str, Any] = {}

    def same_as(self, other: ToolCall) -> bool:
        """Ids are the wire's; arguments compare as values, so a client may write its JSON otherwise."""
        return self.name == other.name and same_json(self.arguments, other.arguments)


class Message(Record, frozen=True, kw_only=True):
    role: str
    """system, user, assistant or tool."""
    content: str = ""
    reasoning: str = ""
    """What an assistant thought before its content; clients may drop it."""
    tool_calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    """Of the call that a tool's message answers; empty where the order of the messages says it."""

    def same_as(self, other: Message) -> bool:
        """Whether a client that echoes `other` means this message.

        Space counts, as everything does that a model could read differently. Only around an assistant's content it does
        not: it was taken off before the client saw the content, and what was sampled stays in the tokens anyway. For the
        same reason an echo may lack an assistant's thinking and some of its calls, and give the calls in another order.
        """
        mine, theirs = self.content, other.content
        if self.role == "assistant":
            mine, theirs = mine.strip(), theirs.strip()
        return (
            self.role == other.role
            and mine == theirs
            and other.reasoning.strip() in ("", self.reasoning.strip())
            and self.paired(other) is not None
        )

    def paired(self, other: Message) -> tuple[int, ...] | None:
        """For each call of the echo `other` the place of this message's call that it repeats; None where one repeats none.

        An echo has at least one call where this message has any.
        """
        if self.tool_calls and not other.tool_calls:
            return None
        free, places = list(range(len(self.tool_calls))), []
        for theirs in other.tool_calls:
            alike = [place for place in free if self.tool_calls[place].same_as(theirs)]
            if not alike:
                return None
            by_id = [place for place in alike if self.tool_calls[place].id == theirs.id]
            places.append((by_id or alike)[0])
            free.remove(places[-1])
        return tuple(places)


def same_json(mine: Any, theirs: Any) -> bool:
    """Equal as JSON that a client read and wrote again: numbers as the doubles of JavaScript, true is not 1."""
    match mine, theirs:
        case (bool(), _) | (_, bool()):
            return mine is theirs
        case (int() | float(), int() | float()):
            return mine == theirs or _as_double(mine) == _as_double(theirs)
        case (dict(), dict()):
            return mine.keys() == theirs.keys() and all(same_json(mine[name], theirs[name]) for name in mine)
        case (list(), list()):
            return len(mine) == len(theirs) and all(map(same_json, mine, theirs))
        case _:
            return type(mine) is type(theirs) and mine == theirs


def _as_double(number: float) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer beyond every double: JavaScript reads Infinity
        return float("inf") if number > 0 else float("-inf")
