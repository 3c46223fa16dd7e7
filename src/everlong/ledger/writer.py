"""Group commit for asyncio callers: facts are checked at once and made durable together, one fsync for all who wait."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from everlong.contracts.errors import LedgerError
from everlong.ledger.facts import Fact
from everlong.ledger.ledger import Ledger
from everlong.ledger.lifecycle import Lifecycle


class LedgerWriter:
    """Owns the ledger while it lives: nobody else appends to it. Use from one event loop.

    Consumes: facts from any number of tasks. Waits for: the disk, in one thread. Produces: durable facts.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        self._waiting: list[asyncio.Future[None]] = []
        self._committing: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def lifecycle(self) -> Lifecycle:
        return self._ledger.lifecycle

    async def append(self, *facts: Fact) -> int:
        """Returns when the facts are durable: the number of the last one. All of them or none.

        Raises LedgerError at once for a fact that contradicts the ledger; then others' facts are unharmed. A caller that is
        cancelled while it waits cannot take its facts back.
        """
        if self._closed:
            raise LedgerError("the ledger writer is closed")
        seq = self._ledger.stage(*facts)
        durable = asyncio.get_running_loop().create_future()
        self._waiting.append(durable)
        if self._committing is None or self._committing.done():
            self._committing = asyncio.create_task(self._commit_all())
        await durable
        return seq

    async def close(self) -> None:
        """Wait for what is under way. The ledger itself stays open. Idempotent."""
        self._closed = True
        if self._committing is not None:
            await asyncio.wait([self._committing])
        self._thread.shutdown()

    async def _commit_all(self) -> None:
        """Commits until nobody waits; facts that come during one commit share the next."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            callers, self._waiting = self._waiting, []
            batch = self._ledger.take_staged()
            try:
                await loop.run_in_executor(self._thread, self._ledger.write, batch)
            except LedgerError as error:
                _settle(callers, error)
            else:
                _settle(callers, None)


def _settle(callers: list[asyncio.Future[None]], error: LedgerError | None) -> None:
    for durable in callers:
        if durable.done():
            continue
        if error is None:
            durable.set_result(None)
        else:
            durable.set_exception(LedgerError(str(error)))
