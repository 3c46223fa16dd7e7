"""Whether a server still lives, asked apart from what it is busy with: a long prefill or a slow update is no hang."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from everlong.engines.vllm_engine.client import ServerLost, VllmClient

T = TypeVar("T")

ASK_EVERY_S = 5.0
MAX_UNANSWERED = 3
"""Questions in a row, each given `client.QUESTION_TIMEOUT_S`, without answer or token between, after which a server hangs. One
alone may be our own event loop that stood still."""


class Pulse:
    """Asks a server for its health while anybody waits for it; one question at a time, however many wait."""

    def __init__(self, client: VllmClient) -> None:
        self._client = client
        self._num_guarded = 0
        self._num_unanswered = 0
        self._asking: asyncio.Task[None] | None = None

    def heard(self) -> None:
        """Something came from the server."""
        self._num_unanswered = 0

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result or error. Raises ServerLost, and cancels the work, where the server hangs meanwhile."""
        working = asyncio.ensure_future(work)
        self._num_guarded += 1
        if self._asking is None:
            self._num_unanswered = 0
            self._asking = asyncio.create_task(self._until_it_hangs())
        try:
            await asyncio.wait({working, self._asking}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ServerLost(
                    f"the vLLM server hangs: nothing came from it, and no answer to {MAX_UNANSWERED} questions for /health"
                )
            return working.result()
        finally:
            self._num_guarded -= 1
            if not self._num_guarded:
                self._asking.cancel()
                self._asking = None
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _until_it_hangs(self) -> None:
        while self._num_unanswered < MAX_UNANSWERED:
            await asyncio.sleep(ASK_EVERY_S)
            if await self._client.answers():
                self.heard()
            else:
                self._num_unanswered += 1
