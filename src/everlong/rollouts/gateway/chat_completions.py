"""The OpenAI chat-completions dialect: bytes of a request to messages, an answer or an error to bytes. No server, no session.

How a turn is sampled comes from the run. A body's own sampling settings (temperature, top_p, max_tokens, stop, seed,
penalties, ...) and its model name are therefore accepted and not used. What would change the shape or the meaning of the
answer (`n`, `response_format`, forced tools, logprobs) is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from everlong.contracts.errors import EverlongError
from everlong.contracts.records import FinishReason, Record
from everlong.rollouts.gateway.session import ChatReply
from everlong.rollouts.messages import Message, ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_ONLY: dict[str, Any] = {
    "n": 1,
    "response_format": {"type": "text"},
    "tool_choice": "auto",
    "logprobs": False,
    "functions": [],
    "function_call": "auto",
}
"""Parameters whose other values cannot be honoured."""


class Refusal(EverlongError):
    """An answer in OpenAI's error shape."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"x-should-retry": "true" if retry else "false"}
        """OpenAI's clients obey it; by themselves they try again after every 429 and 5xx."""
        self._error = {"message": message, "type": kind, "param": param, "code": code}

    @property
    def body(self) -> bytes:
        return msgspec.json.encode({"error": self._error})


class ChatRequest(Record, frozen=True, kw_only=True):
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    stream: bool = False


class _Function(msgspec.Struct):
    name: str
    arguments: str = "{}"


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_Call] | None = None
    reasoning_content: str | None = None


class _Body(msgspec.Struct):
    messages: list[_Message]
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None


def invalid(message: str, *, code: str | None = None, param: str | None = None) -> Refusal:
    return Refusal(400, "invalid_request_error", message, code=code, param=param)


def parse_request(body: bytes) -> ChatRequest:
    """Raises Refusal, with the name of what is wrong."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, Any])
        asked = msgspec.convert(raw, _Body)
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise invalid(f"the body must be a chat-completions request in JSON: {error}") from None
    for name, only in _ONLY.items():
        if raw.get(name) not in (None, only):
            raise invalid(f"{name} can only be {json.dumps(only)} here: leave it out", param=name)
    if not asked.messages:
        raise invalid("messages must hold at least one message", param="messages")
    messages = tuple(_message(message, place) for place, message in enumerate(asked.messages))
    return ChatRequest(messages=messages, tools=tuple(asked.tools or ()), stream=bool(asked.stream))


def _message(raw: _Message, place: int) -> Message:
    param = f"messages.{place}"
    if raw.role not in _ROLES:
        raise invalid(f"{param}.role must be one of {', '.join(_ROLES)}, got {raw.role!r}", param=f"{param}.role")
    return Message(
        role=_ROLES[raw.role],
        content=_text(raw.content or "", f"{param}.content"),
        reasoning=raw.reasoning_content or "",
        tool_calls=tuple(_call(call, f"{param}.tool_calls") for call in raw.tool_calls or ()),
    )


def _text(content: str | list[dict[str, Any]], param: str) -> str:
    """Text parts are joined; images and audio are refused by name."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(f"{param} may hold text only, got a part of type {part.get('type')!r}", param=param)
    return "".join(part["text"] for part in content)


def _call(raw: _Call, param: str) -> ToolCall:
    try:
        arguments = msgspec.json.decode(raw.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise invalid(f"the arguments of {raw.function.name!r} must be a JSON object: {error}", param=param) from None
    return ToolCall(id=raw.id, name=raw.function.name, arguments=arguments)


def finish_reason(reply: ChatReply) -> str:
    """A turn that was cut says so even where it holds a call: the call may be half of what was meant."""
    if reply.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def completion(reply: ChatReply, *, ident: str, model: str, created: int) -> bytes:
    """The whole answer as one JSON object."""
    choice = {"index": 0, "message": _answer(reply.message), "logprobs": None, "finish_reason": finish_reason(reply)}
    head = {"id": ident, "object": "chat.completion", "created": created, "model": model}
    return msgspec.json.encode({**head, "choices": [choice], "usage": _usage(reply)})


def chunks(reply: ChatReply, *, ident: str, model: str, created: int) -> Iterator[bytes]:
    """The answer as server-sent events: the role, what was said, the end with its reason and usage, [DONE].

    A turn is sampled whole before anything of it is sent, so there is one chunk for what was said.
    """
    head = {"id": ident, "object": "chat.completion.chunk", "created": created, "model": model}

    def event(delta: dict[str, Any], reason: str | None = None, **more: object) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return b"data: " + msgspec.json.encode({**head, "choices": [choice], **more}) + b"\n\n"

    said = {name: value for name, value in _answer(reply.message).items() if name != "role" and value}
    for place, call in enumerate(said.get("tool_calls", ())):
        call["index"] = place
    yield event({"role": "assistant", "content": ""})
    if said:
        yield event(said)
    yield event({}, finish_reason(reply), usage=_usage(reply))
    yield b"data: [DONE]\n\n"


def _answer(message: Message) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        answer["reasoning_content"] = message.reasoning
    if message.tool_calls:
        answer["content"] = message.content or None
        answer["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": msgspec.json.encode(call.arguments).decode()},
            }
            for call in message.tool_calls
        ]
    return answer


def _usage(reply: ChatReply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_sampled_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.num_cached_tokens},
    }


def models(model: str) -> bytes:
    card = {"id": model, "object": "model", "created": 0, "owned_by": "everlong"}
    return msgspec.json.encode({"object": "list", "data": [card]})
