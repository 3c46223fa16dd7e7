"""What an engine has lost, said while it is so: what waits for an answer of it says nothing by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from everlong.contracts.errors import EngineError, WorkerDied
from everlong.contracts.ports import Engine
from everlong.contracts.records import EngineStatus

LOOK_EVERY_S = 5.0
_LOG = logging.getLogger(__name__)


@asynccontextmanager
async def trouble_told(engine: Engine) -> AsyncGenerator[None]:
    """Within, the operator is told what of the engine is lost, and when it is whole again."""
    telling = asyncio.create_task(tell(engine.status))
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def tell(status: Callable[[], Awaitable[EngineStatus]], say: Callable[[str], None] = _LOG.warning) -> None:
    """Each trouble once. Ends with the worker, of which others tell."""
    known = ""
    with suppress(WorkerDied):
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            with suppress(EngineError):
                trouble = (await status()).trouble
                if trouble != known:
                    say(trouble or "what was lost of the engine is back")
                known = trouble
