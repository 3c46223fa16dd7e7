"""One HTTP exchange: a bounded body in, an answer out, and an eye on whether the client is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from starlette.types import Receive, Scope, Send

from everlong.rollouts.gateway.refusals import Refusal, invalid

_SETTLE_TURNS = 4
"""Turns of the event loop within which a connection that broke under a write is reported."""


class Exchange:
    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive, self._send = receive, send
        self._headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self._watch: asyncio.Task[None] | None = None
        self._started = False
        self.gone = asyncio.Event()
        """Set once the client has closed the connection; watched from the end of the body on."""

    @property
    def key(self) -> str:
        """The API key, as OpenAI's or as Anthropic's clients send it; empty where there is none."""
        scheme, _, key = self._headers.get(b"authorization", "").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else self._headers.get(b"x-api-key", "").strip()

    @property
    def from_anthropic_client(self) -> bool:
        return b"anthropic-version" in self._headers

    async def body(self, limit: int) -> bytes:
        """Raises Refusal above `limit` bytes, without keeping more than that."""
        refusal = Refusal(413, f"a body may have {limit} bytes", code="body_too_large")
        declared = self._headers.get(b"content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise refusal
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise invalid("the client left in the middle of its body")
            body += message.get("body", b"")
            if len(body) > limit:
                raise refusal
            if not message.get("more_body", False):
                self._watch = asyncio.create_task(self._watch_client())
                return bytes(body)

    async def _watch_client(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            """What comes after the body is nothing to us."""
        self.gone.set()

    async def flush(self, status: int, headers: Mapping[str, str], parts: Iterable[bytes]) -> bool:
        """Write everything and leave the exchange open. False where the client was gone before it was written."""
        if not self.gone.is_set():
            self._started = True
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            await self._send({"type": "http.response.start", "status": status, "headers": raw})
            for part in parts:
                await self._part(part)
            await self._part(b"")  # the server waits for a full buffer before a write, never after it
            for _ in range(_SETTLE_TURNS):
                await asyncio.sleep(0)
        return not self.gone.is_set()

    async def _part(self, part: bytes) -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        self.stop_watching()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """A whole JSON answer that nothing depends on. Not after a flush that was broken off: the server hangs up then."""
        if not self._started:
            await self.flush(status, {**json_headers(body), **(headers or {})}, [body])
            await self.end()

    def stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.cancel()


def json_headers(body: bytes) -> dict[str, str]:
    return {"content-type": "application/json", "content-length": str(len(body))}


EVENT_STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
