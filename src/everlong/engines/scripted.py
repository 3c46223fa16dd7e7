"""The fake that ships: answers come from a callable, everything else behaves like a real engine. No torch.

It has versions, a prefix cache per version, stop ids and strings, limits, and deterministic logprobs; and it can be told
to fail, to stall or to lie, so that whoever stands in front of an engine can be tested.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import StrEnum
from hashlib import blake2b

import msgspec
import numpy as np

from everlong.contracts.errors import EngineError
from everlong.contracts.records import EngineStatus, FinishReason, GenerateReply, GenerateRequest
from everlong.contracts.tokens import NO_VERSION, KeptSets, TokenColumns
from everlong.engines.randomness import stream_of, uniforms
from everlong.engines.requests import check_request, check_version
from everlong.engines.stops import StopWatch
from everlong.weights import WeightReader, WeightSet, fingerprint

Respond = Callable[[GenerateRequest], Sequence[int]]

CACHE_BLOCK_TOKENS = 4


class Fault(StrEnum):
    FAIL = "fail"
    """Raise EngineError."""
    STALL = "stall"
    """Do not answer before `resume`, an abort or the close."""
    LIE = "lie"
    """Answer with one logprob too few, which no honest record can hold."""
    LOSE = "lose"
    """Answer without the last token, which the reported count still counts."""


class ScriptedEngine:
    """An `Engine` whose `respond` gives the ids of a reply; they are cut at the first stop and at the request's limit.

    Without a `reader` any version is taken as published. `policy_version` None starts without one: the first `update`
    brings it. A `respond` that raises makes the request fail with EngineError.
    """

    def __init__(
        self,
        respond: Respond,
        reader: WeightReader | None = None,
        *,
        token_bytes: Sequence[bytes],
        max_context: int = 4096,
        policy_version: int | None = None,
    ) -> None:
        self._respond, self._reader, self._token_bytes = respond, reader, token_bytes
        self._context = max_context
        self._version = NO_VERSION if policy_version is None else policy_version
        self._weights: WeightSet | None = None
        self._cache: set[bytes] = set()
        """Digest of every prefix of whole blocks that the current version has seen."""
        self._faults: list[Fault] = []
        self._resumed = asyncio.Event()
        self._running: list[tuple[str, asyncio.Event]] = []
        """Request id, and the event that aborts it."""
        self._closed = False
        self._num_replies = 0

    def inject(self, *faults: Fault) -> None:
        """The next requests meet these, one each."""
        self._faults += faults

    def resume(self) -> None:
        """Let go of every request that stalls."""
        self._resumed.set()
        self._resumed = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if self._closed:
            raise EngineError("the engine is closed")
        limit = check_request(request, vocab_size=len(self._token_bytes), context=self._context)
        check_version(request, self._version)
        fault = self._faults.pop(0) if self._faults else None
        aborted = asyncio.Event()
        self._running.append((request.request_id, aborted))
        try:
            if fault is Fault.FAIL:
                raise EngineError(f"the engine was told to fail request {request.request_id}")
            await self._hold(aborted, stall=fault is Fault.STALL)
        finally:
            self._running.remove((request.request_id, aborted))
        reply = self._abandon(request) if aborted.is_set() else self._answer(request, limit)
        self._num_replies += 1
        match fault:
            case Fault.LIE:
                return _falsify(reply)
            case Fault.LOSE:
                return msgspec.structs.replace(reply, columns=reply.columns.slice(0, len(reply.columns) - 1))
        return reply

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        for request_id, aborted in self._running:
            if request_id in request_ids:
                aborted.set()

    async def update(self, policy_version: int) -> EngineStatus:
        if self._closed:
            raise EngineError("the engine is closed")
        if policy_version != self._version:
            if self._reader is not None:
                self._weights = self._reader.read(policy_version, self._weights)
            self._version = policy_version
            self._cache.clear()
        return await self.status()

    async def status(self) -> EngineStatus:
        mark = f"scripted-{self._version}" if self._weights is None else fingerprint(self._weights)
        return EngineStatus(
            policy_version=self._version,
            fingerprint=mark,
            num_running=len(self._running),
            metrics={"replies": float(self._num_replies)},
        )

    async def close(self) -> None:
        """Whoever still waits gets an EngineError."""
        self._closed = True
        self.resume()

    async def _hold(self, aborted: asyncio.Event, *, stall: bool) -> None:
        if not stall:
            await asyncio.sleep(0)
            return
        waits = [asyncio.ensure_future(event.wait()) for event in (aborted, self._resumed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._closed:
            raise EngineError("the engine is closed")

    def _answer(self, request: GenerateRequest, limit: int) -> GenerateReply:
        ids, reason, stop_match = self._cut(request, limit)
        truncates = request.params.top_k > 0 or request.params.top_p < 1
        logprobs = _logprobs(request, len(ids), certain=truncates)
        cached = self._look_up(request.prompt_ids)
        self._remember(np.concatenate([request.prompt_ids, ids]))
        columns = TokenColumns.sampled_tokens(
            ids,
            logprobs,
            version=self._version,
            temperature=request.params.temperature,
            kept=KeptSets.from_rows([[i] for i in ids]) if truncates else None,
        )
        return GenerateReply(
            request_id=request.request_id,
            columns=columns,
            finish_reason=reason,
            stop_match=stop_match,
            num_cached_tokens=cached,
            num_reported=len(ids),
        )

    def _cut(self, request: GenerateRequest, limit: int) -> tuple[list[int], FinishReason, int | str | None]:
        try:
            script = [int(i) for i in self._respond(request)]
        except Exception as error:
            raise EngineError(f"the script of request {request.request_id} broke: {error!r}") from error
        if not script or not all(0 <= i < len(self._token_bytes) for i in script):
            raise EngineError(
                f"a script must give ids from 0 to {len(self._token_bytes) - 1}, at least one; "
                f"request {request.request_id} got {script[:20]}"
            )
        watch = StopWatch(request.params, self._token_bytes)
        for index, token in enumerate(script[:limit]):
            if (stop_match := watch.match(token)) is not None:
                return script[: index + 1], FinishReason.STOP, stop_match
        # a script that ends by itself before the limit has said all it wanted to say
        return script[:limit], FinishReason.LENGTH if len(script) >= limit else FinishReason.STOP, None

    def _abandon(self, request: GenerateRequest) -> GenerateReply:
        columns = TokenColumns.sampled_tokens([], [], version=[], temperature=request.params.temperature)
        return GenerateReply(request_id=request.request_id, columns=columns, finish_reason=FinishReason.ABORT)

    def _look_up(self, prompt_ids: np.ndarray) -> int:
        """Tokens of the longest cached prefix; the last token of a prompt is always computed, as in a real engine."""
        cached = 0
        for num_tokens, digest in _prefixes(prompt_ids[: len(prompt_ids) - 1]):
            if digest not in self._cache:
                break
            cached = num_tokens
        return cached

    def _remember(self, ids: np.ndarray) -> None:
        self._cache.update(digest for _, digest in _prefixes(ids))


def _prefixes(ids: np.ndarray) -> list[tuple[int, bytes]]:
    """Length and digest of every prefix of whole blocks."""
    hasher, prefixes = blake2b(digest_size=16), []
    for end in range(CACHE_BLOCK_TOKENS, len(ids) + 1, CACHE_BLOCK_TOKENS):
        hasher.update(np.ascontiguousarray(ids[end - CACHE_BLOCK_TOKENS : end], np.int32).tobytes())
        prefixes.append((end, hasher.digest()))
    return prefixes


def _logprobs(request: GenerateRequest, count: int, *, certain: bool) -> np.ndarray:
    """Between -1 and 0, the same for the same turn; 0 where the kept set is the token alone."""
    if certain:
        return np.zeros(count, np.float32)
    streams = np.full(count, stream_of(request.key), np.uint64)
    return -uniforms(streams, np.arange(count)).astype(np.float32)


def _falsify(reply: GenerateReply) -> GenerateReply:
    object.__setattr__(reply.columns, "logprobs", reply.columns.logprobs[:-1])
    return reply
