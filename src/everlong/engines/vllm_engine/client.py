"""HTTP to a vLLM server: calls, token streams, and the difference between a refusal and a server that is gone."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx2

from everlong.contracts.errors import EngineError

CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 300.0
"""Of calls that change the server; a weight update of a large model is the longest. Sampling takes as long as it takes. Who waits
for either asks meanwhile whether the server lives (`Pulse`)."""
QUESTION_TIMEOUT_S = 10.0
"""Of what a server answers at once, however busy it is."""
MISSING = {403: "is switched off", 404: "is not there"}


class ServerLost(EngineError):
    """The server does not answer any more, or broke off in the middle of an answer."""


class VllmClient:
    """One connection per call: a vLLM server closes the connection of a call that failed, and the next must not fail too."""

    def __init__(self, url: str, uds: str | None = None) -> None:
        self._http = httpx2.AsyncClient(
            transport=httpx2.AsyncHTTPTransport(
                uds=uds, limits=httpx2.Limits(max_connections=None, max_keepalive_connections=0)
            ),
            base_url=url,
        )

    async def get(self, path: str) -> Any:
        return _json(await self._ask(path))

    async def post(self, path: str, body: object = None) -> Any:
        """Raises EngineError with the server's own words, ServerLost where it did not answer in time."""
        return _json(await self._send("POST", path, body))

    async def text(self, path: str) -> str:
        return (await self._ask(path)).text

    async def is_healthy(self) -> bool:
        try:
            await self._ask("/health")
        except EngineError:
            return False
        return True

    async def answers(self) -> bool:
        """Whether anything comes back, be it that the server is not healthy."""
        try:
            await self._ask("/health")
        except ServerLost:
            return False
        except EngineError:
            return True
        return True

    async def stream(self, path: str, body: object) -> AsyncGenerator[str]:
        """The data of each event. Raises ServerLost unless the stream came to its end."""
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        try:
            async with self._http.stream("POST", path, json=body, timeout=timeout) as answer:
                if answer.status_code != 200:
                    await answer.aread()
                    _raise(answer)
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]":
                        return
                    if line.startswith("data: "):
                        yield line[len("data: ") :]
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise ServerLost(f"{path}: the vLLM server broke off: {error!r}") from error
        raise ServerLost(f"{path}: the vLLM server's stream ended without its end mark")

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, path: str) -> httpx2.Response:
        return await self._send("GET", path, timeout_s=QUESTION_TIMEOUT_S)

    async def _send(
        self, method: str, path: str, body: object = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> httpx2.Response:
        timeout = httpx2.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
        try:
            answer = await self._http.request(method, path, json=body, timeout=timeout)
        except httpx2.HTTPError as error:
            raise ServerLost(f"{method} {path}: the vLLM server does not answer: {error!r}") from error
        if answer.status_code != 200:
            _raise(answer)
        return answer


def _json(answer: httpx2.Response) -> Any:
    try:
        return answer.json() if answer.content else None
    except json.JSONDecodeError as error:
        raise EngineError(f"{answer.request.url.path}: expected JSON, got {answer.text[:200]!r}") from error


def _raise(answer: httpx2.Response) -> None:
    path, status = answer.request.url.path, answer.status_code
    if status in MISSING:
        raise EngineError(
            f"{path} {MISSING[status]} at the vLLM server: start it with VLLM_SERVER_DEV_MODE=1 and --tokens-only, as "
            "docs/engines.md says"
        )
    try:
        said = answer.json()["error"]["message"]
    except (json.JSONDecodeError, KeyError, TypeError):
        said = answer.text[:500]
    raise EngineError(f"{path} failed with status {status} at the vLLM server: {said}")
