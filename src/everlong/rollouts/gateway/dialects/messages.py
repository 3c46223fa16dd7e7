"""Anthropic's messages."""

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
    event,
    function_tool,
    text_of,
)
from everlong.rollouts.gateway.refusals import Refusal, invalid
from everlong.rollouts.gateway.session import ChatReply
from everlong.rollouts.messages import Message, ToolCall

_ROLES = ("user", "assistant", "system")
_ONLY = {"mcp_servers": ([],), "container": (None,), "output_format": (None,)}
_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "api_error",
}


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class _Tool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    """None for a tool that the vendor defines or runs."""


class _Body(msgspec.Struct):
    messages: list[_Message]
    system: str | list[dict[str, Any]] | None = None
    tools: list[_Tool] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    stream: bool | None = None


class _Use(msgspec.Struct):
    id: str
    name: str
    input: dict[str, Any]


class _Result(msgspec.Struct):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None


class Messages:
    prefix = "msg_"

    def parse(self, body: bytes) -> ChatRequest:
        asked, raw = decode_body(body, _Body, "messages")
        check_only(raw, _ONLY)
        check_only(asked.tool_choice or {}, {"type": ("auto", "none")}, "tool_choice.")
        check_only(asked.output_config or {}, {"format": (None,)}, "output_config.")
        if not asked.messages:
            raise invalid("messages must hold at least one message", param="messages")
        read = [part for place, raw in enumerate(asked.messages) for part in _read(raw, f"messages.{place}")]
        tools = (_tool(tool) for tool in asked.tools or ())
        return ChatRequest(
            messages=tuple(read),
            tools=tuple(tool for tool in tools if tool is not None),
            tool_choice=(asked.tool_choice or {}).get("type") or "auto",
            stream=bool(asked.stream),
            instructions=_system(asked.system),
        )

    def whole(self, answer: Answer) -> bytes:
        blocks = [_filled(block) for block in _blocks(answer)]
        head = _head(answer, _usage(answer.reply, answer.reply.num_sampled_tokens))
        return msgspec.json.encode({**head, "content": blocks, "stop_reason": _stop_reason(answer.reply)})

    def events(self, answer: Answer) -> Iterator[bytes]:
        """The message opens, then each block opens, grows and closes, then come the reason of the end and the usage."""
        reply = answer.reply
        yield event("message_start", {"message": _head(answer, _usage(reply, 0))})
        for place, (block, deltas) in enumerate(_blocks(answer)):
            yield event("content_block_start", {"index": place, "content_block": block})
            for delta in deltas:
                yield event("content_block_delta", {"index": place, "delta": delta})
            yield event("content_block_stop", {"index": place})
        ended = {"stop_reason": _stop_reason(reply), "stop_sequence": None}
        yield event("message_delta", {"delta": ended, "usage": _usage(reply, reply.num_sampled_tokens)})
        yield event("message_stop", {})

    def refused(self, refusal: Refusal) -> bytes:
        kind = _KINDS.get(refusal.status, "invalid_request_error")
        # Agents know a full context by these words.
        lead = "prompt is too long: " if refusal.code == "context_length_exceeded" else ""
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": f"{lead}{refusal}"}})

    def counted(self, num_tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": num_tokens})


def _system(system: str | list[dict[str, Any]] | None) -> str:
    """Blocks are paragraphs of their own."""
    blocks = system if isinstance(system, list) else [{"type": "text", "text": system or ""}]
    return "\n\n".join(text_of([block], "system") for block in blocks)


def _read(raw: _Message, param: str) -> Iterator[Message]:
    """One message of the wire, as those that it holds: results of tools are messages of their own."""
    if raw.role not in _ROLES:
        raise invalid(f"{param}.role must be one of {', '.join(_ROLES)}, got {raw.role!r}", param=f"{param}.role")
    if isinstance(raw.content, str):
        yield Message(role=raw.role, content=raw.content)
    elif raw.role == "assistant":
        yield _read_answer(raw.content, param)
    else:
        yield from _read_blocks(raw.role, raw.content, param)


def _read_answer(blocks: list[dict[str, Any]], param: str) -> Message:
    text, thought, calls = "", "", []
    for place, block in enumerate(blocks):
        where = f"{param}.content.{place}"
        match block.get("type"):
            case "thinking":
                thought += str(block.get("thinking") or "")
            case "redacted_thinking":
                """Nobody can read it, and an answer of ours never holds it."""
            case "tool_use":
                use = _convert(block, _Use, where)
                calls.append(ToolCall(id=use.id, name=use.name, arguments=use.input))
            case _:
                text += text_of([block], where)
    return Message(role="assistant", content=text, reasoning=thought, tool_calls=tuple(calls))


def _read_blocks(role: str, blocks: list[dict[str, Any]], param: str) -> Iterator[Message]:
    """What stands between the results of tools is a message; its blocks are lines of their own."""
    lines: list[str] = []
    for place, block in enumerate(blocks):
        where = f"{param}.content.{place}"
        if block.get("type") != "tool_result":
            lines.append(text_of([block], where))
            continue
        if lines:
            yield Message(role=role, content="\n".join(lines))
            lines = []
        result = _convert(block, _Result, where)
        yield Message(role="tool", content=text_of(result.content, where), call_id=result.tool_use_id)
    if lines or not blocks:
        yield Message(role=role, content="\n".join(lines))


def _convert(block: dict[str, Any], kind: type, param: str) -> Any:
    try:
        return msgspec.convert(block, kind)
    except msgspec.ValidationError as error:
        raise invalid(f"{param} is no {block.get('type')}: {error}", param=param) from None


def _tool(tool: _Tool) -> dict[str, Any] | None:
    return None if tool.input_schema is None else function_tool(tool.name, tool.description, tool.input_schema)


_Block = tuple[dict[str, Any], list[dict[str, Any]]]
"""How a block begins, and what is added to it."""


def _blocks(answer: Answer) -> list[_Block]:
    """Thinking, content, calls; an answer without any of them still holds an empty text."""
    message, blocks = answer.reply.message, []
    if message.reasoning:
        signature = {"type": "signature_delta", "signature": answer.id}
        deltas = [{"type": "thinking_delta", "thinking": message.reasoning}, signature]
        blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, deltas))
    if message.content or not message.tool_calls:
        blocks.append(({"type": "text", "text": ""}, [{"type": "text_delta", "text": message.content}]))
    for call in message.tool_calls:
        begun = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        blocks.append((begun, [{"type": "input_json_delta", "partial_json": arguments_json(call)}]))
    return blocks


def _filled(block: _Block) -> dict[str, Any]:
    whole, deltas = dict(block[0]), block[1]
    for delta in deltas:
        for name, value in delta.items():
            if name == "partial_json":
                whole["input"] = msgspec.Raw(value.encode())
            elif name != "type":
                whole[name] = value
    return whole


def _head(answer: Answer, usage: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": answer.id,
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }


def _stop_reason(reply: ChatReply) -> str:
    """A turn that was cut says so even where it holds a call: the call may be half of what was meant."""
    if reply.finish_reason is FinishReason.LENGTH:
        return "max_tokens"
    return "tool_use" if reply.message.tool_calls else "end_turn"


def _usage(reply: ChatReply, num_sampled: int) -> dict[str, Any]:
    """Tokens that were found in the cache are not among the input tokens."""
    return {
        "input_tokens": reply.num_prompt_tokens - reply.num_cached_tokens,
        "cache_read_input_tokens": reply.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_sampled,
    }
