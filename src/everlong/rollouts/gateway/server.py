"""The gateway's HTTP server: agents that know nothing of everlong talk to sessions, each by its own API key.

A call is sampled, delivered, and recorded once it is delivered; then the next call of the session may begin. A client
that is gone before leaves no turn: while the engine samples its call is aborted, afterwards what was sampled is discarded.
Listens on loopback only, unless told otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from everlong.contracts.errors import EverlongError, RequestAborted
from everlong.rollouts.gateway import chat_completions as dialect
from everlong.rollouts.gateway.chat_completions import ChatRequest, Refusal
from everlong.rollouts.gateway.exchange import EVENT_STREAM_HEADERS, Exchange, json_headers
from everlong.rollouts.gateway.session import ContextFull, Pending, Session, SessionClosed, TurnLimit

T = TypeVar("T")

MAX_BODY_BYTES = 16 << 20
"""A context of a million tokens as JSON, with room; every waiting call may hold one."""

MAX_CALLS_PER_KEY = 64
"""Calls of one key that wait or run; beyond, an agent could fill the memory with bodies."""


@dataclass(slots=True)
class _Entry:
    key: str
    new_session: Callable[[], Session] | None = None
    """None where the key belongs to one session."""
    live: set[Session] = field(default_factory=set)
    closed: bool = False
    num_calls: int = 0
    """That wait or run."""

    @contextlib.contextmanager
    def call(self) -> Generator[None]:
        if self.num_calls >= MAX_CALLS_PER_KEY:
            message = f"{self.num_calls} calls of this key wait already"
            raise Refusal(429, "rate_limit_error", message, code="busy", retry=True)
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1

    @contextlib.contextmanager
    def session(self) -> Generator[Session]:
        """The key's session, or a new one for the length of a call. Raises Refusal once the key is closed."""
        if self.closed:
            raise _refusal(SessionClosed("this session has ended: no further model calls"))
        if self.new_session is None:
            (session,) = self.live
            yield session
            return
        session = self.new_session()
        self.live.add(session)
        try:
            yield session
        finally:
            self.live.discard(session)

    async def close(self) -> None:
        self.closed = True
        for session in tuple(self.live):
            await session.close()


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
        if not allow_remote and not _is_loopback(host):
            raise ValueError(
                f"the gateway listens on loopback only, got host {host!r}: everyone who reaches another address can try "
                "keys there; allow_remote says that this is meant"
            )
        self._host, self._port, self._model, self._max_body = host, port, model, max_body_bytes
        self._entries: dict[bytes, _Entry] = {}
        """By digest of the key, so that the time of a look-up tells nothing about a key."""
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The base address for clients, with /v1."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._port}/v1"

    async def start(self) -> None:
        """Raises OSError where the address is taken."""
        if self._serving is not None:
            raise ValueError("the gateway runs already")
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, self._port), family=family)
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
        for entry in list(self._entries.values()):
            await entry.close()
        self._server.should_exit = True
        await self._serving
        self._serving = self._server = None

    def open_session(self, session: Session, key: str | None = None) -> str:
        """Calls with the key that is returned are turns of the session. Raises ValueError for a key that is in use."""
        return self._open(_Entry(_checked(key), live={session}))

    def open_endpoint(self, new_session: Callable[[], Session], key: str | None = None) -> str:
        """Every call with the key is the first turn of a new session: for serving a policy, where nothing is trained."""
        return self._open(_Entry(_checked(key), new_session))

    async def close_session(self, key: str) -> None:
        """Further calls get 503. When this returns, every call in flight is recorded or discarded."""
        entry = self._find(key)
        if entry is None:
            raise ValueError("no session is open under this key")
        await entry.close()

    def forget_session(self, key: str) -> None:
        """After `close_session`: the key becomes unknown and its session free."""
        del self._entries[_digest(key)]

    def _open(self, entry: _Entry) -> str:
        digest = _digest(entry.key)
        if digest in self._entries:
            raise ValueError("this key is in use: every session needs its own")
        self._entries[digest] = entry
        return entry.key

    def _find(self, key: str) -> _Entry | None:
        entry = self._entries.get(_digest(key))
        return entry if entry is not None and hmac.compare_digest(entry.key.encode(), key.encode()) else None

    def _authorised(self, key: str) -> _Entry:
        entry = self._find(key)
        if entry is None:
            raise Refusal(401, "authentication_error", "unknown API key", code="invalid_api_key")
        return entry

    def _app(self) -> Starlette:
        async def healthz(_: Request) -> Response:
            return PlainTextResponse("ok")

        async def refused(_: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            refusal = Refusal(error.status_code, "invalid_request_error", error.detail)
            return Response(refusal.body, error.status_code, media_type="application/json")

        routes = [
            Route("/healthz", healthz),
            Route("/v1/models", _Endpoint(self._models), methods=["GET"]),
            Route("/v1/chat/completions", _Endpoint(self._chat), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: refused})

    async def _models(self, exchange: Exchange) -> None:
        self._authorised(exchange.key)
        await exchange.answer(200, dialect.models(self._model))

    async def _chat(self, exchange: Exchange) -> None:
        entry = self._authorised(exchange.key)
        with entry.call():
            request = dialect.parse_request(await exchange.body(self._max_body))
            with entry.session() as session:
                async with session.lock:
                    await self._turn(session, request, exchange)
        await exchange.end()

    async def _turn(self, session: Session, request: ChatRequest, exchange: Exchange) -> None:
        """Sample, deliver, then record. Raises Refusal."""
        pending = await _sample(session, request, exchange)
        if pending is None:
            return
        delivered = False
        try:
            delivered = await self._deliver(pending, request, exchange, session.closed)
        finally:
            await (session.record(pending) if delivered else session.discard(pending, "client_gone"))
        if not delivered:
            raise _refusal(SessionClosed("the session ended before its answer was read"))

    async def _deliver(self, pending: Pending, request: ChatRequest, exchange: Exchange, closed: asyncio.Event) -> bool:
        ident, created = f"chatcmpl-{pending.reply.request_id}", int(time.time())
        if request.stream:
            parts = list(dialect.chunks(pending.chat, ident=ident, model=self._model, created=created))
            headers = EVENT_STREAM_HEADERS
        else:
            parts = [dialect.completion(pending.chat, ident=ident, model=self._model, created=created)]
            headers = json_headers(parts[0])
        # A client that does not read must not hold up the end of its episode.
        return bool(await _unless(closed, exchange.flush(200, headers, parts)))


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """An ASGI application around a handler; what the handler raises becomes the answer."""

    handle: Callable[[Exchange], Awaitable[None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            await self.handle(exchange)
        except Refusal as refusal:
            await exchange.answer(refusal.status, refusal.body, refusal.headers)
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


async def _sample(session: Session, request: ChatRequest, exchange: Exchange) -> Pending | None:
    """None where the client went away meanwhile: the engine's work is aborted and accounted for. Raises Refusal."""
    try:
        return await _unless(exchange.gone, session.sample(request.messages, request.tools))
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
            return dialect.invalid(str(error), code="context_length_exceeded", param="messages")
        case TurnLimit():
            return Refusal(429, "rate_limit_error", str(error), code="turn_limit")
        case SessionClosed() | RequestAborted():
            return Refusal(503, "server_error", str(error), code="session_closed")
        case EverlongError():
            # The cause is in the episode's record; a traceback of ours is not for the agent.
            return Refusal(500, "server_error", "the engine gave no answer", code="engine_failure")
        case _:
            return dialect.invalid(str(error))


def _checked(key: str | None) -> str:
    """A key that fits into a header, a new one for None."""
    if key is None:
        return f"el-{secrets.token_urlsafe(32)}"
    if not key.isascii() or not key.isprintable() or not key.strip() or key != key.strip():
        raise ValueError("an API key must be printable ASCII without spaces at its ends, at least one character")
    return key


def _digest(key: str) -> bytes:
    return blake2b(key.encode(), digest_size=16).digest()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
