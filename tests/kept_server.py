"""A vLLM server that outlives the engines in front of it, so that a suite of tests starts it once."""

from pathlib import Path

import pytest

from everlong.engines.vllm_engine.client import VllmClient
from everlong.engines.vllm_engine.server import StartedServer, find_python


def _missing() -> str:
    try:
        find_python(None)
    except ValueError as error:
        return str(error)
    return ""


needs_vllm = [pytest.mark.skipif(bool(_missing()), reason=_missing()), pytest.mark.timeout(900)]
"""Marks of the tests that run the real server, which takes half a minute and more to start."""


class Kept:
    """A server that engine after engine uses, each as if it had been started for it."""

    def __init__(self, server: StartedServer) -> None:
        self._server = server
        self._client: VllmClient | None = None

    @property
    def remedy(self) -> str:
        return self._server.remedy

    async def start(self) -> VllmClient:
        if self._client is None:
            self._client = await self._server.start()
        return self._client

    async def stop(self) -> None:
        """The next test goes on with it."""


def processes_of(module: str, folder: Path) -> list[int]:
    """Ids of the processes that run a module and were started through the program in `folder`, by their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            environment = (entry / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue  # it ended, or belongs to somebody else
        if words[1:3] == ["-m", module] and str(folder) in environment:
            found.append(int(entry.name))
    return found
