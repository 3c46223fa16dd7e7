"""OpenAI's responses.

An answer is a list of items: thinking, what was said, calls. A tool of type `custom` takes free text; the model sees it as
a function of one string, `input`. Tools that a vendor would run itself (web search and the like) are not offered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    openai_error,
    read_call,
    text_of,
)
from everlong.rollouts.gateway.refusals import Refusal, invalid
from everlong.rollouts.gateway.session import ChatReply
from everlong.rollouts.messages import Message, ToolCall

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text", "refusal")
_THOUGHTS = ("summary_text", "reasoning_text", "text")
_ONLY = {
    "tool_choice": ("auto", "none"),
    "background": (False,),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "conversation": (None,),
    "prompt": (None,),
}
_FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class _Body(msgspec.Struct):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    text: dict[str, Any] | None = None


class Responses:
    prefix = "resp_"

    def parse(self, body: bytes) -> ChatRequest:
        asked, raw = decode_body(body, _Body, "responses")
        check_only(raw, _ONLY)
        check_only(asked.text or {}, {"format": ({"type": "text"},)}, "text.")
        items = asked.input if isinstance(asked.input, list) else [{"role": "user", "content": asked.input}]
        if not items and not asked.previous_response_id:
            raise invalid("input must hold at least one item", param="input")
        offered = (_tool(tool, f"tools.{place}") for place, tool in enumerate(asked.tools or ()))
        return ChatRequest(
            messages=tuple(_message(item, f"input.{place}") for place, item in enumerate(items)),
            tools=tuple(tool for tool in offered if tool is not None),
            tool_choice=asked.tool_choice or "auto",
            stream=bool(asked.stream),
            instructions=asked.instructions or "",
            previous=asked.previous_response_id or "",
            remembered=asked.store is not False,
            echoed={"tools": asked.tools or [], "metadata": raw.get("metadata") or {}},
        )

    def whole(self, answer: Answer) -> bytes:
        return msgspec.json.encode(_response(answer, _items(answer)))

    def events(self, answer: Answer) -> Iterator[bytes]:
        """Every item opens, grows, closes; then the whole answer again. The numbers of the events rise by one."""
        number = iter(range(1 << 30))

        def numbered(kind: str, **data: Any) -> bytes:
            return event(kind, {"sequence_number": next(number), **data})

        begun = {**_response(answer, []), "status": "in_progress", "incomplete_details": None, "usage": None}
        yield numbered("response.created", response=begun)
        yield numbered("response.in_progress", response=begun)
        items = _items(answer)
        for place, item in enumerate(items):
            started = {**item, "status": "in_progress", **_EMPTY[item["type"]]}
            yield numbered("response.output_item.added", output_index=place, item=started)
            for kind, data in _growth(item):
                yield numbered(kind, item_id=item["id"], output_index=place, **data)
            yield numbered("response.output_item.done", output_index=place, item=item)
        response = _response(answer, items)
        yield numbered(f"response.{response['status']}", response=response)

    def refused(self, refusal: Refusal) -> bytes:
        return openai_error(refusal)


def _message(item: dict[str, Any], param: str) -> Message:
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in _READ:
        raise invalid(f"{param} must be an item of type {', '.join(_READ)}, got {kind!r}", param=param)
    return _READ[kind](item, param)


def _read_message(item: dict[str, Any], param: str) -> Message:
    role = _string(item, "role", param)
    if role not in _ROLES:
        raise invalid(f"{param}.role must be one of {', '.join(_ROLES)}, got {role!r}", param=f"{param}.role")
    return Message(role=_ROLES[role], content=text_of(item.get("content"), f"{param}.content", _TEXTS))


def _read_thinking(item: dict[str, Any], param: str) -> Message:
    parts = item.get("summary") or item.get("content") or []
    return Message(role="assistant", reasoning=text_of(parts, f"{param}.summary", _THOUGHTS))


def _read_call(item: dict[str, Any], param: str) -> Message:
    name, ident = _string(item, "name", param), _string(item, "call_id", param)
    call = read_call(ident, name, _string(item, "arguments", param), f"{param}.arguments")
    return Message(role="assistant", tool_calls=(call,))


def _read_free_call(item: dict[str, Any], param: str) -> Message:
    arguments = {"input": _string(item, "input", param)}
    call = ToolCall(id=_string(item, "call_id", param), name=_string(item, "name", param), arguments=arguments)
    return Message(role="assistant", tool_calls=(call,))


def _read_result(item: dict[str, Any], param: str) -> Message:
    content = text_of(item.get("output"), f"{param}.output", _TEXTS)
    return Message(role="tool", content=content, call_id=_string(item, "call_id", param))


_READ: dict[str, Callable[[dict[str, Any], str], Message]] = {
    "message": _read_message,
    "reasoning": _read_thinking,
    "function_call": _read_call,
    "custom_tool_call": _read_free_call,
    "function_call_output": _read_result,
    "custom_tool_call_output": _read_result,
}


def _string(item: dict[str, Any], name: str, param: str) -> str:
    if not isinstance(item.get(name), str):
        raise invalid(f"{param}.{name} must be text, got {item.get(name)!r}", param=f"{param}.{name}")
    return item[name]


def _tool(raw: dict[str, Any], param: str) -> dict[str, Any] | None:
    """None for a tool that the vendor would run."""
    if raw.get("type") == "custom":
        return function_tool(_string(raw, "name", param), raw.get("description"), _FREE_TEXT)
    if raw.get("type") != "function":
        return None
    return function_tool(_string(raw, "name", param), raw.get("description"), raw.get("parameters"))


def _items(answer: Answer) -> list[dict[str, Any]]:
    """Thinking, content, calls; an answer without any of them still says nothing in a message."""
    message, ident = answer.reply.message, answer.id.removeprefix(Responses.prefix)
    free = {tool.get("name") for tool in answer.request.echoed.get("tools", ()) if tool.get("type") == "custom"}
    items: list[dict[str, Any]] = []
    if message.reasoning:
        thoughts = [{"type": "summary_text", "text": message.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{ident}", "summary": thoughts, "status": "completed"})
    if message.content or not message.tool_calls:
        said = [{"type": "output_text", "text": message.content, "annotations": [], "logprobs": []}]
        status = "incomplete" if answer.reply.cut else "completed"
        items.append({"type": "message", "id": f"msg_{ident}", "role": "assistant", "content": said, "status": status})
    for place, call in enumerate(message.tool_calls):
        head = {"id": f"fc_{ident}_{place}", "call_id": call.id, "name": call.name, "status": "completed"}
        if call.name in free and call.arguments.keys() == {"input"}:
            items.append({"type": "custom_tool_call", **head, "input": str(call.arguments["input"])})
        else:
            items.append({"type": "function_call", **head, "arguments": arguments_json(call)})
    return items


_EMPTY: dict[str, dict[str, Any]] = {
    "reasoning": {"summary": []},
    "message": {"content": []},
    "function_call": {"arguments": ""},
    "custom_tool_call": {"input": ""},
}
"""How an item begins, before it grows."""


def _growth(item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    match item["type"]:
        case "reasoning":
            text, at = item["summary"][0]["text"], {"summary_index": 0}
            prefix = "response.reasoning_summary"
            yield f"{prefix}_part.added", {**at, "part": {"type": "summary_text", "text": ""}}
            yield f"{prefix}_text.delta", {**at, "delta": text}
            yield f"{prefix}_text.done", {**at, "text": text}
            yield f"{prefix}_part.done", {**at, "part": item["summary"][0]}
        case "message":
            part, at = item["content"][0], {"content_index": 0}
            yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
            if part["text"]:
                yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**at, "part": part}
        case "function_call":
            yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "response.function_call_arguments.done", done
        case "custom_tool_call":
            yield "response.custom_tool_call_input.delta", {"delta": item["input"]}
            yield "response.custom_tool_call_input.done", {"input": item["input"]}


def _response(answer: Answer, items: list[dict[str, Any]]) -> dict[str, Any]:
    reply, request = answer.reply, answer.request
    cut = reply.finish_reason is FinishReason.LENGTH
    return {
        "id": answer.id,
        "object": "response",
        "created_at": answer.created,
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": request.instructions or None,
        "previous_response_id": request.previous or None,
        "model": answer.model,
        "output": items,
        "parallel_tool_calls": True,
        "tool_choice": request.tool_choice,
        "temperature": None,
        "top_p": None,
        "store": request.remembered,
        **request.echoed,
        "usage": _usage(reply),
    }


def _usage(reply: ChatReply) -> dict[str, Any]:
    return {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.num_sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": reply.num_thinking_tokens},
        "total_tokens": reply.num_prompt_tokens + reply.num_sampled_tokens,
    }
