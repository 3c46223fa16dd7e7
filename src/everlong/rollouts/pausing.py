"""Sampling that can be held back: no new turn begins while it is paused, and nobody's time runs meanwhile.

A turn under way is not touched: in a cell whose engine and trainer take turns it stands still while the trainer computes,
and goes on under the weights that come, each token with its version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from everlong.contracts.ports import Engine
from everlong.contracts.records import EngineStatus, FinishReason, GenerateReply, GenerateRequest
from everlong.contracts.tokens import TokenColumns


class Pause:
    """A switch, and the time limits that stand still while it is on."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._left_s: dict[asyncio.Timeout, float | None] = {}
        """Limits that are spared, with the seconds that each had left when it was stopped; None while it runs."""

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    def pause(self) -> None:
        """Idempotent."""
        if not self.paused:
            self._open.clear()
            for limit in self._left_s:
                self._stop(limit)

    def resume(self) -> None:
        """Idempotent."""
        self._open.set()
        now_s = asyncio.get_running_loop().time()
        for limit, left_s in self._left_s.items():
            if left_s is not None:
                limit.reschedule(now_s + left_s)
                self._left_s[limit] = None

    async def wait(self) -> None:
        """Until it is not paused."""
        await self._open.wait()

    @contextmanager
    def spares(self, limit: asyncio.Timeout) -> Generator[None]:
        """Within, the limit (entered, not yet over) does not run while sampling is paused."""
        self._left_s[limit] = None
        if self.paused:
            self._stop(limit)
        try:
            yield
        finally:
            del self._left_s[limit]

    def _stop(self, limit: asyncio.Timeout) -> None:
        when_s = limit.when()
        if when_s is not None and not limit.expired():
            self._left_s[limit] = when_s - asyncio.get_running_loop().time()
            limit.reschedule(None)


class PausableEngine:
    """An `Engine` in front of which requests wait while sampling is paused."""

    def __init__(self, engine: Engine, pause: Pause) -> None:
        self._engine, self._pause = engine, pause
        self._held: dict[str, asyncio.Event] = {}
        """By request id, what aborts a request that waits."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if self._pause.paused and not await self._let_through(request.request_id):
            nothing = TokenColumns.sampled_tokens([], [], version=[], temperature=request.params.temperature)
            return GenerateReply(request_id=request.request_id, columns=nothing, finish_reason=FinishReason.ABORT)
        return await self._engine.generate(request)

    async def _let_through(self, request_id: str) -> bool:
        """Wait for the end of the pause; False where the request was aborted meanwhile."""
        aborted = self._held[request_id] = asyncio.Event()
        waits = [asyncio.ensure_future(self._pause.wait()), asyncio.ensure_future(aborted.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._held[request_id]
            for wait in waits:
                wait.cancel()
        return not aborted.is_set()

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            if request_id in self._held:
                self._held[request_id].set()
        await self._engine.abort(request_ids)

    async def update(self, policy_version: int) -> EngineStatus:
        return await self._engine.update(policy_version)

    async def status(self) -> EngineStatus:
        return await self._engine.status()

    async def close(self) -> None:
        await self._engine.close()
