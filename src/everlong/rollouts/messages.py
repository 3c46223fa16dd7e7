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
        return self.name == other.name and self.arguments == other.arguments


class Message(Record, frozen=True, kw_only=True):
    role: str
    """system, user, assistant or tool."""
    content: str = ""
    reasoning: str = ""
    """What an assistant thought before its content; clients may drop it."""
    tool_calls: tuple[ToolCall, ...] = ()

    def same_as(self, other: Message) -> bool:
        """Whether a client that echoes `other` means this message.

        Space counts, as everything does that a model could read differently. Only around an assistant's content it does
        not: it was taken off before the client saw the content, and what was sampled stays in the tokens anyway.
        """
        mine, theirs = self.content, other.content
        if self.role == "assistant":
            mine, theirs = mine.strip(), theirs.strip()
        return (
            self.role == other.role
            and mine == theirs
            and len(self.tool_calls) == len(other.tool_calls)
            and all(mine.same_as(theirs) for mine, theirs in zip(self.tool_calls, other.tool_calls, strict=True))
        )
