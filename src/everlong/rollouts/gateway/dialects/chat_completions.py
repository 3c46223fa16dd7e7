"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from everlong.contracts.records import FinishReason
from everlong.rollouts.gateway.dialects.dialect import (
    Answer,
    ChatRequest,
    arguments_json,
    check_only,
    decode_body,
    openai_error,
    read_call,
    text_of,
)
from everlong.rollouts.gateway.refusals import Refusal, invalid
from everlong.rollouts.gateway.session import ChatReply
from everlong.rollouts.messages import Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_ONLY = {
    "n": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "logprobs": (False,),
    "functions": ([],),
    "function_call": ("auto", "none"),
}


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
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same under the name that other servers give it."""


class _Body(msgspec.Struct):
    messages: list[_Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = None


class ChatCompletions:
    prefix = "chatcmpl-"

    def parse(self, body: bytes) -> ChatRequest:
        asked, raw = decode_body(body, _Body, "chat-completions")
        check_only(raw, _ONLY)
        if not asked.messages:
            raise invalid("messages must hold at least one message", param="messages")
        messages = tuple(_message(message, place) for place, message in enumerate(asked.messages))
        return ChatRequest(
            messages=messages,
            tools=tuple(asked.tools or ()),
            tool_choice=asked.tool_choice or "auto",
            stream=bool(asked.stream),
        )

    def whole(self, answer: Answer) -> bytes:
        reply = answer.reply
        said = {"role": "assistant", "content": reply.message.content, **_said(reply.message)}
        if reply.message.tool_calls:
            said["content"] = reply.message.content or None
        choice = {"index": 0, "message": said, "logprobs": None, "finish_reason": _finish_reason(reply)}
        return msgspec.json.encode({**_head(answer, ""), "choices": [choice], "usage": _usage(reply)})

    def events(self, answer: Answer) -> Iterator[bytes]:
        """The role, what was thought, said and called, the end with its reason and usage, [DONE]. All calls are in one chunk."""
        head, reply = _head(answer, ".chunk"), answer.reply

        def chunk(delta: dict[str, Any], reason: str | None = None, **more: object) -> bytes:
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            return b"data: " + msgspec.json.encode({**head, "choices": [choice], **more}) + b"\n\n"

        yield chunk({"role": "assistant", "content": ""})
        for name, value in _said(reply.message).items():
            if name == "tool_calls":
                value = [{"index": place, **call} for place, call in enumerate(value)]
            yield chunk({name: value})
        yield chunk({}, _finish_reason(reply), usage=_usage(reply))
        yield b"data: [DONE]\n\n"

    def refused(self, refusal: Refusal) -> bytes:
        return openai_error(refusal)


def _message(raw: _Message, place: int) -> Message:
    param = f"messages.{place}"
    if raw.role not in _ROLES:
        raise invalid(f"{param}.role must be one of {', '.join(_ROLES)}, got {raw.role!r}", param=f"{param}.role")
    calls = (
        read_call(call.id, call.function.name, call.function.arguments, f"{param}.tool_calls")
        for call in raw.tool_calls or ()
    )
    return Message(
        role=_ROLES[raw.role],
        content=text_of(raw.content, f"{param}.content"),
        reasoning=raw.reasoning_content or raw.reasoning or "",
        tool_calls=tuple(calls),
        call_id=raw.tool_call_id or "",
    )


def _finish_reason(reply: ChatReply) -> str:
    """A turn that was cut says so even where it holds a call: the call may be half of what was meant."""
    if reply.finish_reason is FinishReason.LENGTH:
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": f"chat.completion{kind}",
        "created": answer.created,
        "model": answer.model,
    }


def _said(message: Message) -> dict[str, Any]:
    """What there is of thinking, content and calls, in this order."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_json(call)}}
        for call in message.tool_calls
    ]
    said = {"reasoning_content": message.reasoning, "content": message.content, "tool_calls": calls}
    return {name: value for name, value in said.items() if value}


def _usage(reply: ChatReply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_sampled_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reply.num_thinking_tokens},
    }
