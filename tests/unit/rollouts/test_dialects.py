"""Three dialects say the same: requests become the same messages, answers what the official clients' types expect."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.unit.rollouts.clients import body_of

from everlong.contracts.records import FinishReason
from everlong.rollouts.gateway.dialects.chat_completions import ChatCompletions
from everlong.rollouts.gateway.dialects.dialect import Answer, ChatRequest, Dialect
from everlong.rollouts.gateway.dialects.messages import Messages
from everlong.rollouts.gateway.dialects.responses import Responses
from everlong.rollouts.gateway.keys import Entry
from everlong.rollouts.gateway.refusals import Refusal
from everlong.rollouts.gateway.session import ChatReply
from everlong.rollouts.gateway.transcripts import canonical
from everlong.rollouts.messages import Message, ToolCall

DIALECTS: dict[str, Dialect] = {"chat": ChatCompletions(), "responses": Responses(), "messages": Messages()}
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
BASH = {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": SCHEMA}}
LS, CAT = (
    ToolCall(id=f"call-0-{place}", name="bash", arguments={"command": command})
    for place, command in enumerate(("ls", "cat"))
)
SPOKEN = (
    Message(role="system", content="Be brief."),
    Message(role="user", content="Look."),
    Message(role="assistant", content="So.", reasoning="hm", tool_calls=(LS, CAT)),
    Message(role="tool", content="names", call_id=LS.id),
    Message(role="tool", content="text", call_id=CAT.id),
    Message(role="user", content="And?"),
)
CALLS = [(call.id, call.name, json.dumps(call.arguments)) for call in (LS, CAT)]
BODIES: dict[str, dict[str, Any]] = {
    "chat": {
        "tools": [BASH],
        "messages": [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Look."}]},
            {
                "role": "assistant",
                "content": "So.",
                "reasoning": "hm",
                "tool_calls": [
                    {"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in CALLS
                ],
            },
            {"role": "tool", "tool_call_id": LS.id, "content": "names"},
            {"role": "tool", "tool_call_id": CAT.id, "content": "text"},
            {"role": "user", "content": "And?"},
        ],
    },
    "responses": {
        "instructions": "Be brief.",
        "tools": [{"type": "function", **BASH["function"], "strict": False}, {"type": "web_search"}],
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "So.", "annotations": []}]},
            *({"type": "function_call", "call_id": i, "name": n, "arguments": a} for i, n, a in CALLS),
            {"type": "function_call_output", "call_id": LS.id, "output": "names"},
            {"type": "function_call_output", "call_id": CAT.id, "output": [{"type": "input_text", "text": "text"}]},
            {"role": "user", "content": "And?"},
        ],
    },
    "messages": {
        "max_tokens": 9,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [
            {"name": "bash", "description": "Run.", "input_schema": SCHEMA},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        "messages": [
            {"role": "user", "content": "Look."},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "So."},
                    *({"type": "tool_use", "id": i, "name": n, "input": json.loads(a)} for i, n, a in CALLS),
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": LS.id, "content": "names"},
                    {"type": "tool_result", "tool_use_id": CAT.id, "content": [{"type": "text", "text": "text"}]},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    },
}


def spoken(request: ChatRequest) -> tuple[Message, ...]:
    system = [Message(role="system", content=request.instructions)] if request.instructions else []
    return canonical([*system, *request.messages])


@pytest.mark.parametrize("name", DIALECTS)
def test_the_same_conversation_is_the_same_in_every_dialect(name: str):
    request = DIALECTS[name].parse(json.dumps(BODIES[name]).encode())
    assert spoken(request) == SPOKEN
    assert request.tools == (BASH,) and not request.stream


# Answers -------------------------------------------------------------------------------------------------------------

REPLIES = {
    "words": Message(role="assistant", content="done"),
    "nothing": Message(role="assistant"),
    "thinking alone": Message(role="assistant", reasoning="hm"),
    "a call": Message(role="assistant", tool_calls=(LS,)),
    "everything": Message(role="assistant", content="So.", reasoning="hm", tool_calls=(LS, CAT)),
}
REQUEST = ChatRequest(messages=(), echoed={"tools": [], "metadata": {}})


def answer(dialect: Dialect, message: Message, reason: FinishReason = FinishReason.STOP, **request: Any) -> Answer:
    reply = ChatReply(
        message=message,
        finish_reason=reason,
        num_prompt_tokens=90,
        num_sampled_tokens=7,
        num_cached_tokens=64,
        num_thinking_tokens=3,
    )
    asked = msgspec.structs.replace(REQUEST, **request)
    return Answer(id=f"{dialect.prefix}e.0.0", model="policy", created=5, reply=reply, request=asked)


def events_of(stream: bytes) -> list[tuple[str | None, dict[str, Any]]]:
    events = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        if fields["data"] != "[DONE]":
            events.append((fields.get("event"), json.loads(fields["data"])))
    return events


@pytest.mark.parametrize("said", REPLIES)
@pytest.mark.parametrize("name", DIALECTS)
def test_an_echo_of_an_answer_as_it_was_sent_means_that_answer(name: str, said: str):
    """The echo that the official client's user builds from the parts of the answer."""
    dialect, message = DIALECTS[name], REPLIES[said]
    whole = json.loads(dialect.whole(answer(dialect, message)))
    match name:
        case "chat":
            body = {"messages": [whole["choices"][0]["message"]]}
        case "responses":
            body = {"input": whole["output"]}
        case _:
            body = {"messages": [{"role": "assistant", "content": whole["content"]}]}
    (echo,) = spoken(dialect.parse(json.dumps(body).encode()))
    assert message.same_as(echo) and echo.reasoning == message.reasoning


@pytest.mark.parametrize("said", REPLIES)
def test_a_chat_completion_fits_the_official_types(said: str):
    dialect = DIALECTS["chat"]
    whole = ChatCompletion.model_validate_json(dialect.whole(answer(dialect, REPLIES[said])), strict=True)
    usage = whole.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (90, 7, 97)
    assert usage.prompt_tokens_details.cached_tokens == 64 and usage.completion_tokens_details.reasoning_tokens == 3
    stream = b"".join(dialect.events(answer(dialect, REPLIES[said])))
    chunks = [ChatCompletionChunk.model_validate(data, strict=True) for _, data in events_of(stream)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == (whole.choices[0].message.content or "")
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


@pytest.mark.parametrize("reason, status", [(FinishReason.STOP, "completed"), (FinishReason.LENGTH, "incomplete")])
@pytest.mark.parametrize("said", REPLIES)
def test_a_response_fits_the_official_types(said: str, reason: FinishReason, status: str):
    dialect = DIALECTS["responses"]
    given = answer(dialect, REPLIES[said], reason)
    whole = Response.model_validate_json(dialect.whole(given), strict=True)
    usage = whole.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (90, 7, 97)
    assert usage.input_tokens_details.cached_tokens == 64 and usage.output_tokens_details.reasoning_tokens == 3
    assert whole.status == status
    typed = TypeAdapter(ResponseStreamEvent)
    events = [typed.validate_python(data) for _, data in events_of(b"".join(dialect.events(given)))]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{status}" and events[-1].response == whole
    opened, closed = (
        [e.item.id for e in events if e.type == f"response.output_item.{kind}"] for kind in ("added", "done")
    )
    assert opened == closed == [item.id for item in whole.output]


@pytest.mark.parametrize("said", REPLIES)
def test_a_message_in_parts_is_the_whole_message(said: str):
    dialect = DIALECTS["messages"]
    given = answer(dialect, REPLIES[said])
    whole = json.loads(dialect.whole(given))
    events = events_of(b"".join(dialect.events(given)))
    assert all(kind == data["type"] for kind, data in events)
    blocks: list[dict[str, Any]] = []
    for kind, data in events:
        if kind == "content_block_start":
            blocks.append({**data["content_block"], "json": ""})
        if kind == "content_block_delta":
            for name, value in data["delta"].items():
                if name != "type":
                    name = "json" if name == "partial_json" else name
                    blocks[data["index"]][name] += value
    for block in blocks:
        text = block.pop("json")
        block |= {"input": json.loads(text)} if text else {}
    assert blocks == whole["content"] and blocks
    (started,) = [data["message"] for kind, data in events if kind == "message_start"]
    (ended,) = [data for kind, data in events if kind == "message_delta"]
    assert {**started, "content": blocks, **ended["delta"], "usage": ended["usage"]} == whole
    assert (whole["usage"]["input_tokens"], whole["usage"]["cache_read_input_tokens"]) == (26, 64)
    assert whole["usage"]["output_tokens"] == 7


@pytest.mark.parametrize(
    "name, said, reason, ended",
    [
        ("chat", "words", FinishReason.STOP, "stop"),
        ("chat", "a call", FinishReason.STOP, "tool_calls"),
        ("chat", "everything", FinishReason.LENGTH, "length"),
        ("messages", "words", FinishReason.STOP, "end_turn"),
        ("messages", "a call", FinishReason.STOP, "tool_use"),
        ("messages", "everything", FinishReason.LENGTH, "max_tokens"),
    ],
)
def test_an_answer_says_why_it_ended(name: str, said: str, reason: FinishReason, ended: str):
    dialect = DIALECTS[name]
    whole = json.loads(dialect.whole(answer(dialect, REPLIES[said], reason)))
    assert (whole["stop_reason"] if name == "messages" else whole["choices"][0]["finish_reason"]) == ended


def test_a_tool_that_takes_free_text_gets_free_text():
    dialect = DIALECTS["responses"]
    body = {"input": "x", "tools": [{"type": "custom", "name": "patch", "description": "Change files."}]}
    request = dialect.parse(json.dumps(body).encode())
    assert request.tools[0]["function"]["parameters"]["required"] == ["input"]
    call = ToolCall(id="c", name="patch", arguments={"input": "*** a"})
    message = Message(role="assistant", tool_calls=(call,))
    (item,) = json.loads(dialect.whole(answer(dialect, message, echoed=request.echoed)))["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "*** a")
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "done"}
    echo, result = dialect.parse(json.dumps({"input": [item, output]}).encode()).messages
    assert message.same_as(echo) and result == Message(role="tool", content="done", call_id="c")


# Refusals ------------------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "x"}
REFUSED = {
    ("responses", "no input"): ({}, "input"),
    ("responses", "nothing said"): ({"input": []}, "at least one item"),
    ("responses", "an item nobody knows"): ({"input": [{"type": "computer_call"}]}, "computer_call"),
    ("responses", "an item that is none"): ({"input": [7]}, "input"),
    ("responses", "a type that is no text"): ({"input": [{"type": ["message"]}]}, "item of type"),
    ("responses", "an image"): ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
    ("responses", "an unknown role"): ({"input": [{"role": "oracle", "content": "x"}]}, "oracle"),
    ("responses", "a call without a name"): ({"input": [{"type": "function_call", "call_id": "c"}]}, "input.0.name"),
    ("responses", "a forced tool"): ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ("responses", "work in the background"): ({"input": "x", "background": True}, "background"),
    ("responses", "a JSON answer"): ({"input": "x", "text": {"format": {"type": "json_object"}}}, "text.format"),
    ("responses", "a tool without a name"): ({"input": "x", "tools": [{"type": "function"}]}, "tools.0.name"),
    ("messages", "no messages"): ({}, "messages"),
    ("messages", "nothing said"): ({"messages": []}, "at least one message"),
    ("messages", "an unknown role"): ({"messages": [{"role": "oracle", "content": "x"}]}, "oracle"),
    ("messages", "an image"): ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
    ("messages", "a call without a name"): (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "c"}]}]},
        "messages.0.content.0",
    ),
    ("messages", "a result without a call"): (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "tool_use_id",
    ),
    ("messages", "a forced tool"): ({"messages": [USER], "tool_choice": {"type": "any"}}, "tool_choice.type"),
    ("messages", "a JSON answer"): ({"messages": [USER], "output_config": {"format": {}}}, "output_config.format"),
}


@pytest.mark.parametrize("name, what", REFUSED)
def test_a_body_that_cannot_be_served_is_refused_by_name(name: str, what: str):
    body, word = REFUSED[name, what]
    with pytest.raises(Refusal, match=word.replace(".", r"\.")) as caught:
        DIALECTS[name].parse(json.dumps(body).encode())
    assert caught.value.status == 400


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"a":' * 5000], ids=["cut", "a list", "no text", "deep"])
def test_a_body_that_is_no_json_object_is_refused(name: str, body: bytes):
    with pytest.raises(Refusal, match="JSON"):
        DIALECTS[name].parse(body)


def transcript(name: str, messages: list[Message]) -> tuple[Message, ...]:
    return Entry("key").transcript(DIALECTS[name].parse(body_of(name, messages)))


def calling(*idents: str) -> Message:
    return Message(role="assistant", tool_calls=tuple(ToolCall(id=ident, name="bash") for ident in idents))


def result(ident: str) -> Message:
    return Message(role="tool", content="ok", call_id=ident)


ASKED = Message(role="user", content="x")
UNPAIRED = {
    "a result of nobody's call": ([ASKED, result("c9")], "'c9'"),
    "a result of another call": ([ASKED, calling("c1"), result("c1"), result("c9")], "'c9'"),
    "a result of an earlier call": (
        [ASKED, calling("c1"), result("c1"), Message(role="assistant", content="so"), result("c1")],
        "'c1'",
    ),
    "a call without its result": ([ASKED, calling("c1", "c2"), result("c1")], r"'c2' \(bash\)"),
    "words instead of a result": ([ASKED, calling("c1"), ASKED], "'c1'"),
    "a call and an answer": ([ASKED, calling("c1"), ASKED, Message(role="assistant", content="so"), ASKED], "'c1'"),
}


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize("what", UNPAIRED)
def test_calls_and_results_that_are_not_each_others_are_refused_by_id(name: str, what: str):
    messages, ident = UNPAIRED[what]
    with pytest.raises(Refusal, match=ident) as caught:
        transcript(name, messages)
    assert caught.value.status == 400


@pytest.mark.parametrize("name", DIALECTS)
def test_results_in_any_order_and_a_last_answer_repeated_are_taken(name: str):
    paired = [ASKED, calling("c1", "c2"), result("c2"), result("c1"), calling("c1"), result("c1")]
    assert len(transcript(name, paired)) == len(paired)
    assert transcript(name, [ASKED, calling("c1")])[-1].role == "assistant"


def test_results_without_ids_go_by_their_order():
    call = {"function": {"name": "bash"}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    request = DIALECTS["chat"].parse(json.dumps({"messages": messages}).encode())
    assert len(Entry("key").transcript(request)) == 3


NO_CALLS = {
    "chat": {"messages": [USER], "tool_choice": "none"},
    "responses": {"input": "x", "tool_choice": "none"},
    "messages": {"messages": [USER], "tool_choice": {"type": "none"}},
}
ONE_TOOL = {
    "chat": {"type": "function", "function": {"name": "bash"}},
    "responses": {"type": "function", "name": "bash"},
    "messages": {"name": "bash", "input_schema": {"type": "object"}},
}


@pytest.mark.parametrize("name", DIALECTS)
def test_who_offers_no_tools_or_wants_none_called_gets_no_calls(name: str):
    def asked(**body: object):
        return DIALECTS[name].parse(json.dumps(body).encode())

    tools, refusing = [ONE_TOOL[name]], NO_CALLS[name]
    free = {key: value for key, value in refusing.items() if key != "tool_choice"}
    assert asked(**free, tools=tools).may_call
    assert not asked(**free).may_call and not asked(**free, tools=[]).may_call
    wants_none = asked(**refusing, tools=tools)
    assert not wants_none.may_call and wants_none.tools == asked(**free, tools=tools).tools, "the prompt stays the same"


def test_a_refusal_has_the_shape_of_its_dialect():
    refusal = Refusal(400, "500 tokens and no room", code="context_length_exceeded", param="messages")
    error = json.loads(DIALECTS["responses"].refused(refusal))["error"]
    assert error == {
        "message": "500 tokens and no room",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    assert json.loads(DIALECTS["messages"].refused(refusal)) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 500 tokens and no room"},
    }
