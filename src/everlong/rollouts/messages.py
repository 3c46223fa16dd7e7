"""Chat messages as renderers, sessions and harnesses pass them: the common ground of all dialects."""

from __future__ import annotations

import json
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
    tool_calls: tuple[ToolCall, ...] = ()

    def same_as(self, other: Message) -> bool:
        """Whether a client that echoes `other` means this message."""
        return (
            self.role == other.role
            and self.content.strip() == other.content.strip()
            and len(self.tool_calls) == len(other.tool_calls)
            and all(any(mine.same_as(theirs) for theirs in other.tool_calls) for mine in self.tool_calls)
        )


def message_from_openai(raw: dict[str, Any]) -> Message:
    """From the wire: text parts are joined, developer is system. Raises ValueError for images and unknown roles."""
    role = {"developer": "system"}.get(raw.get("role", ""), raw.get("role", ""))
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"messages need a role of system, developer, user, assistant or tool, got {raw.get('role')!r}")
    content = raw.get("content") or ""
    if isinstance(content, list):
        other = [part.get("type") for part in content if part.get("type") != "text"]
        if other:
            raise ValueError(f"only text is supported in messages, got a part of type {other[0]!r}")
        content = "".join(part["text"] for part in content)
    calls = tuple(_call_from_openai(call) for call in raw.get("tool_calls") or ())
    return Message(role=role, content=content, tool_calls=calls)


def _call_from_openai(raw: dict[str, Any]) -> ToolCall:
    function = raw["function"]
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except json.JSONDecodeError:
        arguments = {"text": function["arguments"]}
    return ToolCall(id=raw.get("id", ""), name=function["name"], arguments=arguments)
