"""The gateway's HTTP server: agents that know nothing of everlong talk to sessions, each by its own API key.

A call is sampled, delivered, and recorded once it is delivered; then the next call of the session may begin. A client
that is gone before leaves no turn: while the engine samples its call is aborted, afterwards what was sampled is discarded.
Listens on loopback only, unless told otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from everlong.contracts.errors import EverlongError, RequestAborted
from everlong.contracts.os_errors import explain_os_error
from everlong.rollouts.gateway.dialects.chat_completions import ChatCompletions
from everlong.rollouts.gateway.dialects.dialect import Answer, ChatRequest, Dialect
from everlong.rollouts.gateway.dialects.messages import Messages
from everlong.rollouts.gateway.dialects.responses import Responses
from everlong.rollouts.gateway.exchange import EVENT_STREAM_HEADERS, Exchange, json_headers
from everlong.rollouts.gateway.keys import Entry, Keyring, checked_key, session_ended
from everlong.rollouts.gateway.refusals import Refusal, invalid
from everlong.rollouts.gateway.session import ContextFull, Pending, Session, SessionClosed, TurnLimit
from everlong.rollouts.messages import Message

T = TypeVar("T")

MAX_BODY_BYTES = 16 << 20
"""A context of a million tokens as JSON, with room; every waiting call may hold one."""


class GatewayServer:
    """`port` 0 takes a free one; `url` says which. Raises ValueError for a host other than loopback without `allow_remote`."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        model: str = "policy",
        allow_remote: bool = False,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        if not allow_remote and not is_loopback(host):
            raise ValueError(
                f"the gateway listens on loopback only, got host {host!r}: everyone who reaches another address can try "
                "keys there; allow_remote says that this is meant"
            )
        self._host, self._port, self._model, self._max_body = host, port, model, max_body_bytes
        self._keyring = Keyring()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The base address for OpenAI's clients, with /v1."""
        return f"{self.root_url}/v1"

    @property
    def root_url(self) -> str:
        """The base address for Anthropic's clients, which add /v1 themselves."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}"

    async def start(self) -> None:
        """Raises OSError where the address is taken."""
        if self._serving is not None:
            raise ValueError("the gateway runs already")
        listener = listen(self._host, self._port)
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app(),
            http="h11",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._serving.done():
            await self._serving

    async def stop(self) -> None:
        """Close every session, then the server."""
        if self._serving is None or self._server is None:
            return
        for entry in self._keyring.entries():
            await entry.close()
        self._server.should_exit = True
        await self._serving
        self._serving = self._server = None

    def open_session(self, session: Session, key: str | None = None) -> str:
        """Calls with the key that is returned are turns of the session. Raises ValueError for a key that is in use."""
        return self._keyring.add(Entry(checked_key(key), live={session}))

    def open_endpoint(self, new_session: Callable[[], Session], key: str | None = None) -> str:
        """Every call with the key is the first turn of a new session: for serving a policy, where nothing is trained."""
        return self._keyring.add(Entry(checked_key(key), new_session))

    async def close_session(self, key: str) -> None:
        """Further calls get 503. When this returns, every call in flight is recorded or discarded."""
        entry = self._keyring.find(key)
        if entry is None:
            raise ValueError("no session is open under this key")
        await entry.close()

    def forget_session(self, key: str) -> None:
        """After `close_session`: the key becomes unknown and its session free."""
        self._keyring.forget(key)

    def _app(self) -> Starlette:
        async def health(_: Request) -> Response:
            return PlainTextResponse("ok")

        async def refused(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            dialect = Messages() if "anthropic-version" in request.headers else ChatCompletions()
            body = dialect.refused(Refusal(error.status_code, error.detail))
            return Response(body, error.status_code, media_type="application/json")

        routes = [
            Route("/health", health),
            Route("/healthz", health),
            Route("/v1/models", _Endpoint(self._models), methods=["GET"]),
            Route("/v1/models/{model:path}", _Endpoint(self._models), methods=["GET"]),
            Route("/v1/chat/completions", self._speaks(ChatCompletions()), methods=["POST"]),
            Route("/v1/responses", self._speaks(Responses()), methods=["POST"]),
            Route("/v1/messages", self._speaks(Messages()), methods=["POST"]),
            Route("/v1/messages/count_tokens", _Endpoint(self._count_tokens, Messages()), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: refused})

    def _speaks(self, dialect: Dialect) -> _Endpoint:
        async def chat(exchange: Exchange) -> None:
            await self._chat(dialect, exchange)

        return _Endpoint(chat, dialect)

    async def _models(self, exchange: Exchange) -> None:
        self._keyring.authorised(exchange.key)
        wanted = exchange.scope["path_params"].get("model", self._model)
        if wanted != self._model:
            raise Refusal(404, f"there is one model, {self._model!r}, not {wanted!r}", code="model_not_found")
        await exchange.answer(200, _model_card(self._model, listed="model" not in exchange.scope["path_params"]))

    async def _count_tokens(self, exchange: Exchange) -> None:
        entry, dialect = self._keyring.authorised(exchange.key), Messages()
        with entry.call():
            request = dialect.parse(await exchange.body(self._max_body))
            with entry.session() as session:
                num_tokens = session.count(entry.transcript(request), request.tools)
        await exchange.answer(200, dialect.counted(num_tokens))

    async def _chat(self, dialect: Dialect, exchange: Exchange) -> None:
        entry = self._keyring.authorised(exchange.key)
        with entry.call():
            request = dialect.parse(await exchange.body(self._max_body))
            with entry.session() as session:
                async with session.lock:
                    answer = await self._turn(dialect, session, request, entry.transcript(request), exchange)
                    if answer is not None:
                        entry.remember(answer.id, request, answer.reply.message)
        await exchange.end()

    async def _turn(
        self,
        dialect: Dialect,
        session: Session,
        request: ChatRequest,
        messages: Sequence[Message],
        exchange: Exchange,
    ) -> Answer | None:
        """Sample, deliver, then record. None where the client went away before. Raises Refusal."""
        pending = await _sample(session, messages, request, exchange)
        if pending is None:
            return None
        ident = f"{dialect.prefix}{pending.reply.request_id}"
        answer = Answer(id=ident, model=self._model, created=int(time.time()), reply=pending.chat, request=request)
        delivered = False
        try:
            # A client that does not read must not hold up the end of its episode.
            delivered = bool(await _unless(session.closed, _deliver(dialect, answer, exchange)))
        finally:
            await (session.record(pending) if delivered else session.discard(pending, "client_gone"))
        if not delivered:
            raise session_ended("the session ended before its answer was read")
        return answer


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """An ASGI application around a handler; what the handler raises becomes the answer."""

    handle: Callable[[Exchange], Awaitable[None]]
    dialect: Dialect | None = None
    """In which it refuses; None where that depends on the client."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await self.handle(exchange)
        except Refusal as refusal:
            dialect = self.dialect or (Messages() if exchange.from_anthropic_client else ChatCompletions())
            await exchange.answer(refusal.status, dialect.refused(refusal), refusal.headers)
        finally:
            exchange.stop_watching()


class _Server(uvicorn.Server):
    """Signals belong to the process, not to its gateway."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


async def _deliver(dialect: Dialect, answer: Answer, exchange: Exchange) -> bool:
    if answer.request.stream:
        return await exchange.flush(200, EVENT_STREAM_HEADERS, list(dialect.events(answer)))
    body = dialect.whole(answer)
    return await exchange.flush(200, json_headers(body), [body])


async def _sample(
    session: Session, messages: Sequence[Message], request: ChatRequest, exchange: Exchange
) -> Pending | None:
    """None where the client went away meanwhile: the engine's work is aborted and accounted for. Raises Refusal."""
    try:
        return await _unless(exchange.gone, session.sample(messages, request.tools, calls=request.may_call))
    except (EverlongError, ValueError) as error:
        raise _refusal(error) from error


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` gives; None where the event came before its end, and then it is cancelled and over."""
    if event.is_set():
        work.close()
        return None
    task, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    return None if task.cancelled() else task.result()


def _refusal(error: Exception) -> Refusal:
    match error:
        case ContextFull():
            return invalid(str(error), code="context_length_exceeded", param="messages")
        case TurnLimit():
            return Refusal(429, str(error), code="turn_limit")
        case SessionClosed() | RequestAborted():
            return session_ended(str(error))
        case EverlongError():
            # The cause is in the episode's record; a traceback of ours is not for the agent.
            return Refusal(500, "the engine gave no answer", code="engine_failure")
        case _:
            return invalid(str(error))


def _model_card(model: str, *, listed: bool) -> bytes:
    """One card, or the list of all one, in the words of both OpenAI and Anthropic."""
    card = {"id": model, "object": "model", "created": 0, "owned_by": "everlong"}
    card |= {"type": "model", "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
    page = {"object": "list", "data": [card], "has_more": False, "first_id": model, "last_id": model}
    return msgspec.json.encode(page if listed else card)


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError where the address is taken, or not this machine's."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(f"cannot listen at {host}, port {port}: {explain_os_error(error)}") from error


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
