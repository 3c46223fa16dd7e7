"""The responses and messages dialects over a real socket, with the official clients of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai
import pytest
from pydantic import TypeAdapter
from tests.loop.rollouts.test_http_gateway import END, TOKENIZER, USER, Journal, World, make_session, says, until, world

from everlong.engines.scripted import Fault
from everlong.rollouts.gateway.server import GatewayServer

BASH_SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = {"name": "bash", "description": "Run.", "input_schema": BASH_SCHEMA}
FUNCTION = {"type": "function", "name": "bash", "description": "Run.", "parameters": BASH_SCHEMA, "strict": False}


def call(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


SCRIPT = (f"<think>hm</think>So. {call('ls')}{call('wc -l é')}", call("cat notes"), "done")
"""Thinking, words and two calls at once; a call; words."""


def claude(w: World, key: str | None = None) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=w.server.root_url, api_key=key or w.key, max_retries=0, timeout=20)


async def say(w: World, messages: list[Any], stream: bool = False, **more: Any) -> anthropic.types.Message:
    async with claude(w) as client:
        asked = {"model": "any", "max_tokens": 99, "messages": messages, **more}
        if not stream:
            return await client.messages.create(**asked)
        async with client.messages.stream(**asked) as events:
            return await events.get_final_message()


async def respond(w: World, given: Any, stream: bool = False, **more: Any) -> openai.types.responses.Response:
    async with w.client() as client:
        asked = {"model": "any", "input": given, **more}
        if not stream:
            return await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        return events[-1].response


async def claude_at_work(w: World, stream: bool) -> list[str]:
    """A tool-using task to its end, as an agent on Anthropic's client does it; the stop reasons."""
    spoken: list[Any] = [USER]
    reasons = []
    while True:
        message = await say(w, spoken, stream, system="Be brief.", tools=[TOOL])
        reasons.append(message.stop_reason)
        uses = [block for block in message.content if block.type == "tool_use"]
        if not uses:
            return reasons
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": use.input["command"]} for use in uses]
        spoken += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


async def responder_at_work(w: World, stream: bool) -> list[str]:
    spoken: list[Any] = [USER]
    statuses = []
    while True:
        response = await respond(w, spoken, stream, instructions="Be brief.", tools=[FUNCTION], store=False)
        statuses.append(response.status)
        calls = [item for item in response.output if item.type == "function_call"]
        spoken += response.output
        if not calls:
            return statuses
        for item in calls:
            output = json.loads(item.arguments)["command"]
            spoken.append({"type": "function_call_output", "call_id": item.call_id, "output": output})


async def chatter_at_work(w: World, stream: bool) -> list[str]:
    spoken: list[Any] = [{"role": "system", "content": "Be brief."}, USER]
    tools = [{"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": BASH_SCHEMA}}]
    reasons = []
    while True:
        async with w.client() as client:
            asked = {"model": "any", "messages": spoken, "tools": tools}
            if stream:
                async with client.chat.completions.stream(**asked) as events:
                    choice = (await events.get_final_completion()).choices[0]
            else:
                choice = (await client.chat.completions.create(**asked)).choices[0]
        reasons.append(choice.finish_reason)
        spoken.append(choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        if not choice.message.tool_calls:
            return reasons
        for item in choice.message.tool_calls:
            output = json.loads(item.function.arguments)["command"]
            spoken.append({"role": "tool", "tool_call_id": item.id, "content": output})


AGENTS: dict[str, tuple[Callable[[World, bool], Any], list[str]]] = {
    "chat": (chatter_at_work, ["tool_calls", "tool_calls", "stop"]),
    "responses": (responder_at_work, ["completed"] * 3),
    "messages": (claude_at_work, ["tool_use", "tool_use", "end_turn"]),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", AGENTS)
async def test_an_official_client_works_with_tools_to_the_end_and_no_turn_forks(name: str, stream: bool):
    work, ends = AGENTS[name]
    async with world(says(*SCRIPT), syntax="hermes") as w:
        assert await work(w, stream) == ends
    turns = w.session.turns
    assert ([turn.parent for turn in turns], w.session.num_forks) == ([-1, 0, 1], 0)
    for turn, said in zip(turns, SCRIPT, strict=True):
        assert turn.sampled.ids.tolist() == [*TOKENIZER.encode(said), END]
    results = TOKENIZER.decode(turns[1].context.ids.tolist())
    assert results.index("\nls\n") < results.index("\nwc -l é\n") and "system" not in results
    assert "Be brief." in TOKENIZER.decode(turns[0].context.ids.tolist())
    assert [fact for fact, _ in w.journal.facts] == ["turn 0", "turn 1", "turn 2"]


async def test_every_dialect_gives_the_engine_the_same_prompts():
    prompts = {}
    for name, (work, _) in AGENTS.items():
        async with world(says(*SCRIPT), syntax="hermes") as w:
            await work(w, False)
        prompts[name] = [turn.context.ids.tolist() for turn in w.session.turns]
    assert prompts["chat"] == prompts["responses"] == prompts["messages"]


async def test_a_message_fits_the_official_types_and_says_what_was_found_in_the_cache():
    async with world(says(*SCRIPT), syntax="hermes") as w:
        async with claude(w) as client:
            asked: Any = {"model": "any", "max_tokens": 9, "messages": [USER], "tools": [TOOL]}
            raw = await client.messages.with_raw_response.create(**asked)
        message = anthropic.types.Message.model_validate_json(await raw.text(), strict=True)
        again = await say(w, [USER], tools=[TOOL])
    turn = w.session.turns[0]
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[2].input == {"command": "ls"}
    assert (message.usage.input_tokens, message.usage.output_tokens) == (len(turn.context), len(turn.sampled))
    assert again.usage.cache_read_input_tokens > 0
    assert again.usage.cache_read_input_tokens + again.usage.input_tokens == len(turn.context)


async def test_the_events_of_a_message_fit_the_official_types():
    typed = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    async with world(says(*SCRIPT), syntax="hermes") as w:
        body = json.dumps({"messages": [USER], "max_tokens": 9, "stream": True}).encode()
        status, payload = await w.raw(body, path="/v1/messages")
    lines = [line for line in payload.decode().splitlines() if line.startswith("data: ")]
    events = [typed.validate_json(line.removeprefix("data: ")) for line in lines]
    assert status == 200 and (events[0].type, events[-1].type) == ("message_start", "message_stop")


@pytest.mark.parametrize("dialect", ["responses", "messages"])
async def test_a_turn_cut_at_the_limit_says_so(dialect: str):
    async with world(lambda request: TOKENIZER.encode("x" * 500), max_context=100) as w:
        if dialect == "messages":
            assert (await say(w, [USER])).stop_reason == "max_tokens"
        else:
            response = await respond(w, "Count.")
            assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")


async def test_a_response_may_name_the_one_before_instead_of_repeating_it():
    async with world(says("one", "two", "three")) as w:
        first = await respond(w, "a", instructions="Be brief.")
        second = await respond(w, "b", instructions="Be brief.", previous_response_id=first.id)
        await respond(w, "c", instructions="Be brief.", previous_response_id=second.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await respond(w, "d", previous_response_id="resp_none")
        assert caught.value.code == "previous_response_not_found"
        unstored = await respond(w, "e", store=False)
        with pytest.raises(openai.BadRequestError):
            await respond(w, "f", previous_response_id=unstored.id)
    assert [turn.parent for turn in w.session.turns] == [-1, 0, 1, -1]


async def test_tokens_are_counted_and_nothing_is_sampled():
    async with world(says("done")) as w:
        async with claude(w) as client:
            counted = await client.messages.count_tokens(model="any", messages=[USER], system="s", tools=[TOOL])
        assert w.session.turns == () and w.journal.facts == []
        await say(w, [USER], system="s", tools=[TOOL])
        await until(lambda: bool(w.session.turns))
        assert counted.input_tokens == len(w.session.turns[0].context)
        again = [USER, {"role": "assistant", "content": "done"}, USER]
        async with claude(w) as client:
            counted = await client.messages.count_tokens(model="any", messages=again, system="s", tools=[TOOL])
        await say(w, again, system="s", tools=[TOOL])
    assert counted.input_tokens == sum(len(t.context) + len(t.sampled) for t in w.session.turns) - len("done!")


async def test_models_and_health_are_told_to_both_clients():
    async with world(says("done")) as w:
        async with claude(w) as client:
            page = await client.models.list()
            assert [(model.id, model.type) for model in page.data] == [("policy", "model")]
            assert (await client.models.retrieve("policy")).display_name == "policy"
            with pytest.raises(anthropic.NotFoundError):
                await client.models.retrieve("another")
        async with w.client() as client:
            assert (await client.models.retrieve("policy")).owned_by == "everlong"
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("another")
        for path in ("/health", "/healthz"):
            assert await w.raw(b"", path=path, method="GET") == (200, b"ok")


async def test_anthropics_client_meets_refusals_in_its_own_words():
    async with world(says("done"), max_turns=1, max_context=200, max_body_bytes=2000) as w:
        with pytest.raises(anthropic.AuthenticationError):
            async with claude(w, "wrong") as client:
                await client.messages.create(model="any", max_tokens=9, messages=[USER])
        with pytest.raises(anthropic.RequestTooLargeError):
            await say(w, [{"role": "user", "content": "x" * 3000}])
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            await say(w, [{"role": "user", "content": "x" * 500}])
        w.engine.inject(Fault.FAIL)
        with pytest.raises(anthropic.InternalServerError, match="engine gave no answer"):
            await say(w, [USER])
        with pytest.raises(anthropic.RateLimitError) as limited:
            await say(w, [USER])
        assert limited.value.body["error"]["type"] == "rate_limit_error"
        await w.server.close_session(w.key)
        with pytest.raises(anthropic.InternalServerError) as closed:
            await say(w, [USER])
        assert closed.value.status_code == 503 and closed.value.response.headers["x-should-retry"] == "false"
    assert w.session.turns == ()


async def test_a_key_may_come_as_a_bearer_token_of_anthropics_client():
    async with world(says("done")) as w:
        client = anthropic.AsyncAnthropic(base_url=w.server.root_url, auth_token=w.key, max_retries=0)
        await client.messages.create(model="any", max_tokens=9, messages=[USER])
        await client.close()
    assert len(w.session.turns) == 1


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_turn_whose_client_is_gone_stays_out_of_the_tree_and_is_discarded(path: str, stream: bool):
    writers: list[asyncio.StreamWriter] = []

    def leave_and_answer(request) -> list[int]:
        if writers:
            writers.pop().transport.abort()
        return [*TOKENIZER.encode("done"), END]

    async with world(leave_and_answer) as w:
        _, writer = await w.connect()
        writers.append(writer)
        body = json.dumps({"input": [USER], "messages": [USER], "stream": stream}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nx-api-key: {w.key}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until(lambda: bool(w.journal.facts))
        assert w.journal.facts == [("client_gone", 5)] and w.session.turns == ()
        if path == "/v1/responses":
            with pytest.raises(openai.BadRequestError):
                await respond(w, "x", previous_response_id=f"resp_{w.session.order.episode}.0.0")


async def test_an_endpoint_remembers_no_response():
    async with world(says("one")) as w:
        key = w.server.open_endpoint(lambda: make_session(w.engine, Journal()))
        async with w.client(key) as client:
            first = await client.responses.create(model="any", input="a")
            with pytest.raises(openai.BadRequestError, match="repeat what was said"):
                await client.responses.create(model="any", input="b", previous_response_id=first.id)


def test_the_base_url_of_each_client_is_told():
    server = GatewayServer(port=8123)
    assert (server.url, server.root_url) == ("http://127.0.0.1:8123/v1", "http://127.0.0.1:8123")


async def answered_in_text(w: World, dialect: str, **more: Any) -> tuple[str, str]:
    """What the client reads, and why it ended."""
    if dialect == "messages":
        message = await say(w, [USER], **more)
        return message.content[0].text, message.stop_reason
    if dialect == "responses":
        response = await respond(w, "x", **more)
        return response.output_text, response.output[0].type
    async with w.client() as client:
        answer = await client.chat.completions.create(model="any", messages=[USER], **more)
    return answer.choices[0].message.content, answer.choices[0].finish_reason


TEXT_ENDS = {"chat": "stop", "responses": "message", "messages": "end_turn"}
NONE_CALLED = {
    "chat": {"tools": [{"type": "function", "function": {"name": "bash"}}], "tool_choice": "none"},
    "responses": {"tools": [FUNCTION], "tool_choice": "none"},
    "messages": {"tools": [TOOL], "tool_choice": {"type": "none"}},
}


@pytest.mark.parametrize("tools", ["no tools", "none to call"])
@pytest.mark.parametrize("dialect", AGENTS)
async def test_a_client_without_tools_is_answered_in_text_and_the_tokens_stay_as_sampled(dialect: str, tools: str):
    async with world(says(call("ls")), syntax="hermes") as w:
        more = NONE_CALLED[dialect] if tools == "none to call" else {}
        assert await answered_in_text(w, dialect, **more) == (call("ls"), TEXT_ENDS[dialect])
    (turn,) = w.session.turns
    assert turn.sampled.ids.tolist() == [*TOKENIZER.encode(call("ls")), END]
