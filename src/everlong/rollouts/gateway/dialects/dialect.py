"""What the server asks of a dialect, and what all dialects read and write alike."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from everlong.contracts.records import Record
from everlong.rollouts.gateway.refusals import Refusal, invalid
from everlong.rollouts.gateway.session import ChatReply
from everlong.rollouts.messages import Message, ToolCall

T = TypeVar("T")


class ChatRequest(Record, frozen=True, kw_only=True):
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """As `{"type": "function", "function": {...}}`, whatever the dialect."""
    tool_choice: str = "auto"
    """Or "none": the tools stand in the prompt and none is called."""
    stream: bool = False
    instructions: str = ""
    """A system prompt apart from the messages; it holds for this request only."""
    previous: str = ""
    """Id of an earlier answer, whose request and words stand before the messages."""
    remembered: bool = False
    """Whether a later request may name the answer as its `previous`."""
    echoed: Mapping[str, Any] = {}
    """Of the body, what the answer repeats."""

    @property
    def may_call(self) -> bool:
        """Whether the answer may hold calls; else what reads like one is text."""
        return bool(self.tools) and self.tool_choice != "none"


class Answer(Record, frozen=True, kw_only=True):
    """A sampled turn on its way to the client."""

    id: str
    """With the dialect's prefix."""
    model: str
    created: int
    """Unix time in seconds."""
    reply: ChatReply
    request: ChatRequest


class Dialect(Protocol):
    prefix: str
    """Of the ids of answers."""

    def parse(self, body: bytes) -> ChatRequest:
        """Raises Refusal, with the name of what is wrong."""
        ...

    def whole(self, answer: Answer) -> bytes:
        """The answer as one JSON object."""
        ...

    def events(self, answer: Answer) -> Iterator[bytes]:
        """The answer as server-sent events. A turn is sampled whole before anything of it is sent."""
        ...

    def refused(self, refusal: Refusal) -> bytes: ...


def decode_body(body: bytes, kind: type[T], what: str) -> tuple[T, dict[str, Any]]:
    """The fields of `kind`, and the whole body. Raises Refusal."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, Any])
        return msgspec.convert(raw, kind), raw
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise invalid(f"the body must be a {what} request in JSON: {error}") from None


def check_only(raw: Mapping[str, Any], only: Mapping[str, Sequence[Any]], within: str = "") -> None:
    """Raises Refusal where a parameter has a value that cannot be honoured: one that is not among its `only` ones."""
    for name, values in only.items():
        if raw.get(name) is not None and raw[name] not in values:
            param = f"{within}{name}"
            raise invalid(f"{param} can only be {json.dumps(values[0])} here: leave it out", param=param)


def text_of(content: Any, param: str, kinds: Sequence[str] = ("text",)) -> str:
    """Text, or parts that hold text, joined; images and audio are refused by name."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise invalid(f"{param} must be text or a list of parts, got {type(content).__name__}", param=param)
    return "".join(_part_text(part, param, kinds) for part in content)


def _part_text(part: Any, param: str, kinds: Sequence[str]) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (type(part).__name__, None)
    if kind not in kinds or not isinstance(text, str):
        raise invalid(f"{param} may hold text only, got a part of type {kind!r}", param=param)
    return text


def read_call(ident: str, name: str, arguments: str, param: str) -> ToolCall:
    """A call whose arguments are JSON in a string. Raises Refusal."""
    try:
        values = msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise invalid(f"the arguments of {name!r} must be a JSON object: {error}", param=param) from None
    return ToolCall(id=ident, name=name, arguments=values)


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    about = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **about, "parameters": parameters or {"type": "object"}}}


def arguments_json(call: ToolCall) -> str:
    return msgspec.json.encode(call.arguments).decode()


def event(kind: str, data: Mapping[str, Any]) -> bytes:
    """One named server-sent event."""
    return f"event: {kind}\ndata: ".encode() + msgspec.json.encode({"type": kind, **data}) + b"\n\n"


OPENAI_KINDS = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


def openai_error(refusal: Refusal) -> bytes:
    kind = OPENAI_KINDS.get(refusal.status, "invalid_request_error")
    body = {"message": str(refusal), "type": kind, "param": refusal.param, "code": refusal.code}
    return msgspec.json.encode({"error": body})
