"""API keys and what is behind each: the session of one episode, or a maker of sessions."""

from __future__ import annotations

import contextlib
import hmac
import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from hashlib import blake2b

from everlong.rollouts.gateway.dialects.dialect import ChatRequest
from everlong.rollouts.gateway.refusals import Refusal, invalid
from everlong.rollouts.gateway.session import Session
from everlong.rollouts.gateway.transcripts import canonical, check_calls
from everlong.rollouts.messages import Message

MAX_CALLS_PER_KEY = 64
"""Calls of one key that wait or run; beyond, an agent could fill the memory with bodies."""


@dataclass(frozen=True, slots=True)
class _Remembered:
    previous: str
    messages: tuple[Message, ...]
    """Of the request, without its instructions, and the answer."""


@dataclass(slots=True)
class Entry:
    key: str
    new_session: Callable[[], Session] | None = None
    """None where the key belongs to one session."""
    live: set[Session] = field(default_factory=set)
    closed: bool = False
    num_calls: int = 0
    """That wait or run."""
    remembered: dict[str, _Remembered] = field(default_factory=dict)
    """Answers by id, for requests that name one instead of repeating what was said."""

    @contextlib.contextmanager
    def call(self) -> Generator[None]:
        if self.num_calls >= MAX_CALLS_PER_KEY:
            raise Refusal(429, f"{self.num_calls} calls of this key wait already", code="busy", retry=True)
        self.num_calls += 1
        try:
            yield
        finally:
            self.num_calls -= 1

    @contextlib.contextmanager
    def session(self) -> Generator[Session]:
        """The key's session, or a new one for the length of a call. Raises Refusal once the key is closed."""
        if self.closed:
            raise session_ended("this session has ended: no further model calls")
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

    def transcript(self, request: ChatRequest) -> tuple[Message, ...]:
        """Everything that was said, from the start, in the session's form. Raises Refusal for an unknown previous answer, and
        for calls and results that are not each other's."""
        parts, ident = [request.messages], request.previous
        while ident:
            if ident not in self.remembered:
                message = f"this session has no answer {ident!r}: repeat what was said instead of naming it"
                raise invalid(message, code="previous_response_not_found", param="previous_response_id")
            parts.append(self.remembered[ident].messages)
            ident = self.remembered[ident].previous
        system = (Message(role="system", content=request.instructions),) if request.instructions else ()
        messages = canonical([*system, *(message for part in reversed(parts) for message in part)])
        check_calls(messages)
        return messages

    def remember(self, ident: str, request: ChatRequest, said: Message) -> None:
        if request.remembered and self.new_session is None:
            self.remembered[ident] = _Remembered(request.previous, (*request.messages, said))


class Keyring:
    """Entries by digest of their key, so that the time of a look-up tells nothing about a key."""

    def __init__(self) -> None:
        self._entries: dict[bytes, Entry] = {}

    def add(self, entry: Entry) -> str:
        """Raises ValueError for a key that is in use."""
        digest = _digest(entry.key)
        if digest in self._entries:
            raise ValueError("this key is in use: every session needs its own")
        self._entries[digest] = entry
        return entry.key

    def find(self, key: str) -> Entry | None:
        entry = self._entries.get(_digest(key))
        return entry if entry is not None and hmac.compare_digest(entry.key.encode(), key.encode()) else None

    def authorised(self, key: str) -> Entry:
        """Raises Refusal for an unknown key."""
        entry = self.find(key)
        if entry is None:
            raise Refusal(401, "unknown API key", code="invalid_api_key")
        return entry

    def forget(self, key: str) -> None:
        del self._entries[_digest(key)]

    def entries(self) -> list[Entry]:
        return list(self._entries.values())


def session_ended(message: str) -> Refusal:
    return Refusal(503, message, code="session_closed")


def checked_key(key: str | None) -> str:
    """A key that fits into a header, a new one for None."""
    if key is None:
        return f"el-{secrets.token_urlsafe(32)}"
    if not key.isascii() or not key.isprintable() or not key.strip() or key != key.strip():
        raise ValueError("an API key must be printable ASCII without spaces at its ends, at least one character")
    return key


def _digest(key: str) -> bytes:
    return blake2b(key.encode(), digest_size=16).digest()
