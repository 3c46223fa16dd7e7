"""Whether an answer was delivered, where the connection breaks under the write itself."""

from __future__ import annotations

import asyncio

import pytest

from everlong.rollouts.gateway.exchange import Exchange
from everlong.rollouts.gateway.refusals import Refusal


class Wire:
    """A connection whose other end is found to be gone `turns` turns of the loop after the first write; None: never."""

    def __init__(self, *parts: bytes, turns: int | None = None) -> None:
        self._incoming = [
            {"type": "http.request", "body": part, "more_body": place < len(parts) - 1}
            for place, part in enumerate(parts)
        ]
        self._turns, self._broken = turns, asyncio.Event()
        self.sent = b""
        self.exchange = Exchange({"headers": [(b"authorization", b"Bearer k")]}, self._receive, self._send)

    async def _receive(self):
        if not self._incoming:
            await self._broken.wait()
            return {"type": "http.disconnect"}
        return self._incoming.pop(0)

    async def _send(self, message) -> None:
        self.sent += message.get("body", b"")
        if self._turns is not None:
            self._break_in(self._turns)

    def _break_in(self, turns: int) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(self._break_in, turns - 1) if turns else self._broken.set()


@pytest.mark.parametrize("turns, delivered", [(None, True), (0, False), (1, False), (2, False)])
async def test_a_connection_that_breaks_under_the_write_delivers_nothing(turns: int | None, delivered: bool):
    wire = Wire(b"{}", turns=turns)
    await wire.exchange.body(10)
    assert await wire.exchange.flush(200, {}, [b"a", b"b"]) is delivered
    assert wire.sent == b"ab"
    wire.exchange.stop_watching()


async def test_a_body_is_joined_and_bounded():
    assert await Wire(b"ab", b"cd").exchange.body(4) == b"abcd"
    with pytest.raises(Refusal) as caught:
        await Wire(b"ab", b"cd", b"never read").exchange.body(3)
    assert caught.value.status == 413


@pytest.mark.parametrize(
    "header, key", [(b"Bearer k", "k"), (b"bearer  k ", "k"), (b"Basic k", ""), (b"k", ""), (b"\xff", ""), (b"", "")]
)
def test_the_key_is_a_bearer_token(header: bytes, key: str):
    assert Exchange({"headers": [(b"Authorization", header)]}, None, None).key == key
