"""The gateway over a real socket, with the openai client and with clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import openai
import pytest

from everlong.contracts.errors import WorkerDied
from everlong.contracts.records import EpisodeOrder, GenerateRequest, Purpose, SamplingParams
from everlong.engines.scripted import Fault, ScriptedEngine
from everlong.rollouts.gateway.server import GatewayServer
from everlong.rollouts.gateway.session import Session, SessionLimits
from everlong.rollouts.messages import Message
from everlong.rollouts.renderers.chatml import ChatML, ToolSyntax
from everlong.rollouts.renderers.tokenizers import ByteTokenizer

TOKENIZER = ByteTokenizer()
END = TOKENIZER.special("<|im_end|>")
USER = {"role": "user", "content": "Count the lines."}
ORDER = EpisodeOrder(task="t", group=1, attempt=0, purpose=Purpose.TRAIN)
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}


@dataclass
class Journal:
    facts: list[tuple[str, int]] = field(default_factory=list)

    async def turn_sampled(self, order: EpisodeOrder, turn: int, num_tokens: int) -> None:
        self.facts.append((f"turn {turn}", num_tokens))

    async def tokens_discarded(self, order: EpisodeOrder, num_tokens: int, reason: str) -> None:
        self.facts.append((reason, num_tokens))

    async def call_uncounted(self, order: EpisodeOrder, max_tokens: int, reason: str) -> None:
        self.facts.append((f"uncounted, {reason}", max_tokens))


def says(*answers: str) -> Callable[[GenerateRequest], Sequence[int]]:
    """The answers in order, whatever is asked; the last one again and again."""
    return lambda request: [*TOKENIZER.encode(answers[min(request.key.turn, len(answers) - 1)]), END]


@dataclass
class World:
    engine: ScriptedEngine
    server: GatewayServer
    session: Session
    journal: Journal
    key: str

    def client(self, key: str | None = None) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.server.url, api_key=key or self.key, max_retries=0, timeout=20)

    async def ask(self, messages: Sequence[dict], **more):
        async with self.client() as client:
            return await client.chat.completions.create(model="any", messages=messages, **more)

    async def raw(self, body: bytes, *, key: str | None = None, path: str = "/v1/chat/completions", method="POST"):
        reader, writer = await self.connect()
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key or self.key}\r\nConnection: close\r\n"
        )
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        status, _, payload = answer.partition(b"\r\n\r\n")
        return int(status.split()[1]), payload

    async def connect(self):
        return await asyncio.open_connection("127.0.0.1", int(self.server.url.split(":")[2].split("/")[0]))

    async def send(self, writer: asyncio.StreamWriter, **more) -> None:
        body = json.dumps({"model": "any", "messages": [USER], **more}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()


def make_session(
    engine,
    journal: Journal,
    *,
    max_turns: int = 8,
    max_context: int = 4096,
    syntax: ToolSyntax = "dollar",
    tokenizer: ByteTokenizer = TOKENIZER,
) -> Session:
    renderer = ChatML(tokenizer, syntax)
    return Session(
        ORDER,
        engine=engine,
        renderer=renderer,
        params=SamplingParams(max_tokens=max_context, stop_ids=renderer.stop_ids),
        run_seed=7,
        limits=SessionLimits(max_turns=max_turns, max_context=max_context),
        journal=journal,
    )


@asynccontextmanager
async def world(respond, *, max_body_bytes: int = 1 << 20, **session) -> AsyncIterator[World]:
    engine = ScriptedEngine(respond, token_bytes=TOKENIZER.token_bytes(), policy_version=3)
    journal = Journal()
    made = make_session(engine, journal, **session)
    server = GatewayServer(max_body_bytes=max_body_bytes)
    await server.start()
    try:
        yield World(engine, server, made, journal, server.open_session(made))
    finally:
        await server.stop()
        await engine.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for is in the server, which tells nobody
            await asyncio.sleep(0.005)


async def test_a_plain_answer_has_its_reason_and_usage():
    async with world(says("done")) as w:
        answer = await w.ask([USER])
    choice, usage = answer.choices[0], answer.usage
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "done", "stop")
    turn = w.session.turns[0]
    assert usage.prompt_tokens == len(turn.context) and usage.completion_tokens == 5
    assert usage.total_tokens == usage.prompt_tokens + 5
    assert answer.id == f"chatcmpl-{turn.request_id}"
    assert w.journal.facts == [("turn 0", 5)]


async def test_a_command_becomes_a_tool_call_and_its_result_continues_the_turn():
    async with world(says("$ wc -l notes", "done")) as w:
        first = await w.ask([USER], tools=[BASH])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls" and message.content is None
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("bash", {"command": "wc -l notes"})
        result = {"role": "tool", "tool_call_id": call.id, "content": "3 notes"}
        await w.ask([USER, message.model_dump(exclude_none=True), result], tools=[BASH])
    assert [turn.parent for turn in w.session.turns] == [-1, 0]
    assert w.session.num_forks == 0


async def test_a_turn_cut_at_the_limit_says_length():
    async with world(lambda request: TOKENIZER.encode("x" * 500), max_context=100) as w:
        answer = await w.ask([USER])
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == 100


async def test_half_a_command_is_no_call_for_any_client():
    async with world(lambda request: TOKENIZER.encode("$ rm -rf " + "x" * 500), max_context=100) as w:
        choice = (await w.ask([USER], tools=[BASH])).choices[0]
    assert choice.finish_reason == "length"
    assert not choice.message.tool_calls and choice.message.content.startswith("$ rm -rf x")


@pytest.mark.parametrize("said, reason", [("done", "stop"), ("$ ls", "tool_calls")])
async def test_a_stream_says_what_the_whole_answer_says(said: str, reason: str):
    async with world(says(said)) as w:
        events = [event async for event in await w.ask([USER], stream=True, tools=[BASH])]
        whole = (await w.ask([USER], tools=[BASH])).choices[0].message
    assert events[0].choices[0].delta.role == "assistant"
    deltas = [event.choices[0].delta for event in events]
    assert "".join(delta.content or "" for delta in deltas) == (whole.content or "")
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (place, call.function.name, call.function.arguments) for place, call in enumerate(whole.tool_calls or ())
    ]
    assert [event.choices[0].finish_reason for event in events] == [None, None, reason]
    assert events[-1].usage.completion_tokens == len(said) + 1


async def test_a_stream_ends_with_done_on_the_wire():
    async with world(says("done")) as w:
        status, payload = await w.raw(json.dumps({"messages": [USER], "stream": True}).encode())
    assert status == 200
    assert payload.count(b"data: ") == 4 and b"data: [DONE]\n\n" in payload


async def test_over_http_the_tree_is_what_the_in_process_session_makes():
    answers = ("$ cat notes", "<think>two lines</think>$ wc -l notes", "é done")
    async with world(says(*answers), syntax="dollar") as w:
        spoken: list[dict] = [{"role": "developer", "content": "Be short."}, USER]
        for result in ("a\nb\n", "2 notes", None):
            message = (await w.ask(spoken, tools=[BASH])).choices[0].message
            spoken.append({"role": "assistant", "content": message.content, "tool_calls": message.tool_calls})
            if result is not None:
                spoken.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": result})
    engine = ScriptedEngine(says(*answers), token_bytes=TOKENIZER.token_bytes(), policy_version=3)
    local = make_session(engine, Journal())
    messages = [Message(role="system", content="Be short."), Message(role="user", content=USER["content"])]
    for result in ("a\nb\n", "2 notes", None):
        messages.append((await local.chat(messages, (BASH,))).message)
        if result is not None:
            messages.append(Message(role="tool", content=result))
    assert w.session.num_forks == local.num_forks == 0
    assert len(w.session.turns) == len(local.turns) == 3
    for mine, theirs in zip(w.session.turns, local.turns, strict=True):
        assert (mine.parent, mine.request_id) == (theirs.parent, theirs.request_id)
        assert mine.context == theirs.context and mine.sampled == theirs.sampled


async def test_the_models_and_the_health_are_told():
    async with world(says("done")) as w:
        async with w.client() as client:
            assert [model.id async for model in await client.models.list()] == ["policy"]
        assert await w.raw(b"", path="/healthz", method="GET") == (200, b"ok")
        status, payload = await w.raw(b"", path="/v1/embeddings")
    assert status == 404 and json.loads(payload)["error"]["type"] == "invalid_request_error"


async def test_sampling_settings_of_the_body_change_nothing():
    async with world(says("done")) as w:
        await w.ask([USER], temperature=0.1, max_tokens=1, stop=["d"], seed=4, top_p=0.5)
    assert w.session.turns[0].sampled.ids.tolist() == [*TOKENIZER.encode("done"), END]
    assert np.all(w.session.turns[0].sampled.temperatures == 1)


@pytest.mark.parametrize("key", ["wrong", "el-", "k" * 5000])
async def test_an_unknown_key_is_refused(key: str):
    async with world(says("done")) as w:
        with pytest.raises(openai.AuthenticationError):
            async with w.client(key) as client:
                await client.chat.completions.create(model="any", messages=[USER])
        assert (await w.raw(b"", path="/v1/models", method="GET", key=key))[0] == 401
    assert w.session.turns == ()


async def test_a_key_that_is_in_use_or_fits_no_header_is_refused():
    async with world(says("done")) as w:
        for key in (w.key, "", " k", "a\nb", "é"):
            with pytest.raises(ValueError, match="key"):
                w.server.open_session(w.session, key)


async def test_a_closed_session_answers_503_and_a_forgotten_one_401():
    async with world(says("done")) as w:
        await w.ask([USER])
        await w.server.close_session(w.key)
        with pytest.raises(openai.InternalServerError) as caught:
            await w.ask([USER])
        assert caught.value.status_code == 503 and caught.value.code == "session_closed"
        w.server.forget_session(w.key)
        with pytest.raises(openai.AuthenticationError):
            await w.ask([USER])
    assert len(w.session.turns) == 1


async def test_calls_beyond_the_turn_limit_get_429():
    async with world(says("done"), max_turns=1) as w:
        await w.ask([USER])
        with pytest.raises(openai.RateLimitError) as caught:
            await w.ask([USER])
    assert caught.value.code == "turn_limit"
    assert caught.value.response.headers["x-should-retry"] == "false"


async def test_a_prompt_that_leaves_no_room_gets_context_length_exceeded():
    async with world(says("done"), max_context=40) as w:
        with pytest.raises(openai.BadRequestError) as caught:
            await w.ask([{"role": "user", "content": "x" * 100}])
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "chunked"])
async def test_a_body_above_the_limit_gets_413_and_nothing_is_sampled(declared: bool):
    async with world(says("done"), max_body_bytes=1000) as w:
        body = json.dumps({"messages": [{"role": "user", "content": "x" * 2000}]}).encode()
        if declared:
            status, payload = await w.raw(body)
        else:
            reader, writer = await w.connect()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {w.key}\r\n"
            writer.write(
                f"{head}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
            )
            status = int((await reader.readline()).split()[1])
            payload = b'{"error": {"code": "body_too_large"}}'
            writer.close()
    assert status == 413 and json.loads(payload)["error"]["code"] == "body_too_large"
    assert w.session.turns == ()


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "bash", "arguments": "[1]"}}]}
DEEP = b'{"messages": ' + b"[" * 200_000
BAD_BODIES = {
    "a result of no call": (b'{"messages": [{"role": "tool", "tool_call_id": "c9", "content": "x"}]}', "'c9'"),
    "not JSON": (b"{", "JSON"),
    "not an object": (b"[]", "object"),
    "deep": (DEEP, "JSON"),
    "lone surrogate": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "JSON"),
    "no messages": (b"{}", "messages"),
    "empty messages": (b'{"messages": []}', "messages"),
    "a message that is none": (b'{"messages": [7]}', "messages"),
    "an unknown role": (b'{"messages": [{"role": "oracle", "content": "x"}]}', "oracle"),
    "a role that is no text": (b'{"messages": [{"role": ["user"]}]}', "role"),
    "content that is a number": (b'{"messages": [{"role": "user", "content": 7}]}', "content"),
    "an image": (json.dumps({"messages": [IMAGE]}).encode(), "image_url"),
    "arguments that are no object": (json.dumps({"messages": [CALL]}).encode(), "arguments"),
    "two answers": (json.dumps({"messages": [USER], "n": 2}).encode(), "n can only be 1"),
    "a JSON answer": (
        json.dumps({"messages": [USER], "response_format": {"type": "json_object"}}).encode(),
        "response",
    ),
    "a forced tool": (json.dumps({"messages": [USER], "tool_choice": "required"}).encode(), "tool_choice"),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_body_that_cannot_be_served_gets_400_by_name(name: str):
    body, word = BAD_BODIES[name]
    async with world(says("done")) as w:
        status, payload = await w.raw(body)
        error = json.loads(payload)["error"]
        assert (status, error["type"]) == (400, "invalid_request_error") and word in error["message"]
        await w.ask([USER])
    assert len(w.session.turns) == 1, "a refused body is no turn and does no harm to the session"


@pytest.mark.parametrize(
    "messages",
    [[{"role": "tool", "tool_call_id": "", "content": "out of nowhere"}], [{"role": "user", "content": "a\0b"}]],
    ids=["a tool result without an id", "a null byte"],
)
async def test_odd_messages_are_text_like_any_other(messages: list[dict]):
    async with world(says("done")) as w:
        await w.ask(messages)
    assert messages[0]["content"] in TOKENIZER.decode(w.session.turns[0].context.ids.tolist())


async def test_an_engine_that_fails_gets_500_without_its_traceback_and_the_runner_learns_it():
    async with world(says("done")) as w:
        w.engine.inject(Fault.FAIL)
        with pytest.raises(openai.InternalServerError) as caught:
            await w.ask([USER])
        assert caught.value.code == "engine_failure" and "told to fail" not in str(caught.value)
        assert "told to fail" in str(w.session.refusal)
        await w.ask([USER])
        assert w.session.refusal is None


async def test_a_worker_that_died_is_kept_for_the_runner():
    class DeadEngine(ScriptedEngine):
        async def generate(self, request):
            raise WorkerDied("the worker is gone")

    async with world(says("done")) as w:
        w.session._engine = DeadEngine(says("x"), token_bytes=TOKENIZER.token_bytes())
        with pytest.raises(openai.InternalServerError):
            await w.ask([USER])
    assert isinstance(w.session.refusal, WorkerDied)


async def test_two_calls_at_once_are_two_turns_one_after_the_other():
    async with world(says("one", "two")) as w:
        answers = await asyncio.gather(w.ask([USER]), w.ask([USER]))
    assert sorted(answer.choices[0].message.content for answer in answers) == ["one", "two"]
    assert [turn.parent for turn in w.session.turns] == [-1, -1], "the same question twice has two answers"
    assert w.session.num_forks == 0


async def test_a_flood_of_calls_on_one_key_is_refused_and_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("everlong.rollouts.gateway.keys.MAX_CALLS_PER_KEY", 2)
    async with world(says("done")) as w:
        w.engine.inject(Fault.STALL)
        held = [asyncio.create_task(w.ask([USER])) for _ in range(2)]
        await until(lambda: w.server._keyring.entries()[0].num_calls == 2)
        with pytest.raises(openai.RateLimitError) as caught:
            await w.ask([USER])
        assert caught.value.code == "busy"
        other = make_session(w.engine, Journal())
        async with w.client(w.server.open_session(other)) as client:
            await client.chat.completions.create(model="any", messages=[USER])
        w.engine.resume()
        await asyncio.gather(*held)


async def test_a_client_that_leaves_while_the_engine_samples_aborts_the_call():
    async with world(says("done")) as w:
        w.engine.inject(Fault.STALL)
        _, writer = await w.connect()
        await w.send(writer)
        await until(lambda: bool(w.engine._running))
        writer.close()
        await until(lambda: not w.engine._running and not w.session.lock.locked())
        assert w.session.turns == () and w.journal.facts == []
        await w.ask([USER])
    assert len(w.session.turns) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_turn_whose_client_left_before_its_answer_is_discarded(stream: bool):
    writers: list[asyncio.StreamWriter] = []

    def leave_and_answer(request: GenerateRequest) -> list[int]:
        if writers:
            writers.pop().transport.abort()
        return [*TOKENIZER.encode("done"), END]

    async with world(leave_and_answer) as w:
        _, writer = await w.connect()
        writers.append(writer)
        await w.send(writer, stream=stream)
        await until(lambda: bool(w.journal.facts))
        assert w.journal.facts == [("client_gone", 5)]
        assert w.session.turns == () and w.session.num_discarded == 5
        await w.ask([USER])
    assert w.journal.facts[1:] == [("turn 0", 5)]


async def test_a_client_that_does_not_read_cannot_hold_up_the_end_of_its_episode():
    class Loud(ByteTokenizer):
        """Two tokens of it are more text than every buffer on the way to the client."""

        def decode(self, ids: Sequence[int]) -> str:
            return "a" * 20_000_000

    async with world(says("x"), tokenizer=Loud()) as w:
        quiet = socket.socket()
        quiet.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        quiet.connect(("127.0.0.1", int(w.server.url.split(":")[2].split("/")[0])))
        reader, writer = await asyncio.open_connection(sock=quiet, limit=1024)
        await w.send(writer)
        assert await reader.readexactly(15) == b"HTTP/1.1 200 OK"
        async with asyncio.timeout(20):
            await w.server.close_session(w.key)
        assert w.journal.facts == [("client_gone", 2)] and w.session.turns == ()
        writer.transport.abort()


async def test_closing_a_session_aborts_the_call_in_flight():
    async with world(says("done")) as w:
        w.engine.inject(Fault.STALL)
        call = asyncio.create_task(w.ask([USER]))
        await until(lambda: bool(w.engine._running))
        await w.server.close_session(w.key)
        assert not w.engine._running
        with pytest.raises(openai.InternalServerError) as caught:
            await call
        assert caught.value.status_code == 503


async def test_an_endpoint_serves_every_call_from_a_session_of_its_own():
    async with world(says("one", "two")) as w:
        made: list[Session] = []

        def new() -> Session:
            made.append(make_session(w.engine, w.journal))
            return made[-1]

        key = w.server.open_endpoint(new, "a-key-of-mine")
        async with w.client(key) as client:
            calls = [client.chat.completions.create(model="any", messages=[USER]) for _ in range(3)]
            answers = await asyncio.gather(*calls)
        assert [answer.choices[0].message.content for answer in answers] == ["one"] * 3
        assert len(made) == 3 and all(len(session.turns) == 1 for session in made)
        await w.server.close_session(key)
        with pytest.raises(openai.InternalServerError):
            async with w.client(key) as client:
                await client.chat.completions.create(model="any", messages=[USER])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org"])
def test_an_address_that_others_reach_must_be_meant(host: str):
    with pytest.raises(ValueError, match="allow_remote"):
        GatewayServer(host)
    GatewayServer(host, allow_remote=True)


async def test_a_taken_port_is_an_error_and_a_stopped_server_frees_its_own():
    async with world(says("done")) as w:
        port = int(w.server.url.split(":")[2].split("/")[0])
        with pytest.raises(OSError):
            await GatewayServer(port=port).start()
    again = GatewayServer(port=port)
    await again.start()
    await again.stop()
