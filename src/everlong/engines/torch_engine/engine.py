"""The embedded engine: continuous batching over a paged cache, in one thread, taking turns with the trainer on the cores.

The event loop's side decides and keeps the books; one thread computes a step or loads weights, always under the lease.
Weights change between two steps only, and a token carries the version that was held when it was sampled.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from everlong.contracts.errors import EngineError
from everlong.contracts.records import EngineStatus, FinishReason, GenerateReply, GenerateRequest
from everlong.contracts.tokens import NO_VERSION
from everlong.engines.config import EmbeddedConfig
from everlong.engines.randomness import uniforms
from everlong.engines.requests import check_request, check_version
from everlong.engines.torch_engine.answers import Answer
from everlong.engines.torch_engine.blocks import BlockPool
from everlong.engines.torch_engine.loading import fingerprint_of_model
from everlong.engines.torch_engine.meters import Meters
from everlong.engines.torch_engine.runner import StepResult, StepRunner
from everlong.engines.torch_engine.sampler import Draws
from everlong.engines.torch_engine.scheduler import Scheduler
from everlong.models.llama.model import Llama
from everlong.weights import WeightReader, WeightSet, fingerprint

R = TypeVar("R")


class TorchEngine:
    """An `Engine`. It refuses requests until the first `update`: before that its weights have no version.

    `token_bytes` are the bytes each id of the vocabulary stands for. `lease` is shared with whoever else computes here.
    """

    def __init__(
        self,
        model: Llama,
        reader: WeightReader,
        *,
        token_bytes: Ordered[bytes],
        config: EmbeddedConfig,
        lease: asyncio.Lock,
    ) -> None:
        if len(token_bytes) != model.config.vocab_size:
            raise ValueError(f"the model has {model.config.vocab_size} tokens, got bytes for {len(token_bytes)}")
        self._model, self._reader, self._token_bytes, self._lease = model, reader, token_bytes, lease
        self._context = config.context(model.config.max_positions)
        self._pool = BlockPool(config.cache_tokens // config.block_tokens, config.block_tokens)
        self._scheduler = Scheduler(
            self._pool,
            max_running=config.max_running,
            chunk_tokens=config.prefill_chunk_tokens,
            prefix_cache=config.prefix_cache,
            policy_version=NO_VERSION,
        )
        self._runner = StepRunner(model, self._pool.num_blocks, config.block_tokens)
        self._version, self._fingerprint = NO_VERSION, fingerprint_of_model(model)
        self._weights: WeightSet | None = None
        self._answers: dict[int, Answer] = {}
        """By the number of their sequence."""
        self._aborted: set[int] = set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._loop_task: asyncio.Task[None] | None = None
        self._wake, self._updating = asyncio.Event(), asyncio.Lock()
        self._stepping = False
        self._refusal: str | None = None
        """Why no more requests are taken."""
        self._meters = Meters()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if self._refusal is not None:
            raise EngineError(self._refusal)
        shape = self._model.config
        max_tokens = check_request(
            request, vocab_size=shape.vocab_size, context=self._context, decisions=shape.decisions
        )
        check_version(request, self._version)
        sequence = self._scheduler.add(request.prompt_ids.tolist())
        answer = Answer.to(request, sequence, max_tokens, self._token_bytes)
        self._answers[sequence.number] = answer
        if self._loop_task is None:
            self._loop_task = asyncio.create_task(self._loop())
        self._wake.set()
        try:
            return await answer.reply
        finally:
            if sequence.number in self._answers:  # the caller was cancelled
                self._abort({sequence.number})

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        self._abort({n for n, answer in self._answers.items() if answer.request.request_id in request_ids})

    async def update(self, policy_version: int) -> EngineStatus:
        async with self._updating:
            if self._refusal is not None:
                raise EngineError(self._refusal)
            if policy_version != self._version:
                await self._change_weights(policy_version)
            return await self.status()

    async def status(self) -> EngineStatus:
        return EngineStatus(
            policy_version=self._version,
            fingerprint=self._fingerprint,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            metrics={
                **self._meters.values(),
                "preemptions": self._scheduler.num_preemptions,
                "cache_used": 1 - self._pool.num_available / self._pool.num_blocks,
            },
        )

    async def close(self) -> None:
        """Finish the step that runs; whoever still waits gets an EngineError."""
        self._refuse("the engine is closed")
        self._wake.set()
        if self._loop_task is not None:
            await self._loop_task
        async with self._updating:
            self._thread.shutdown()

    async def _loop(self) -> None:
        """Consumes waiting requests, waits for the lease before each step, produces replies."""
        while self._refusal is None:
            if not self._answers:
                self._wake.clear()
                await self._wake.wait()
                continue
            async with self._lease:
                try:
                    await self._step()
                except Exception:
                    self._refuse(f"the engine broke in a step and takes no more requests:\n{traceback.format_exc()}")

    async def _step(self) -> None:
        if self._refusal is not None or not (works := self._scheduler.plan()):
            return  # closed, or all were aborted, while the lease was awaited
        sampling = [self._answers[work.sequence.number] for work in works if work.samples]
        self._stepping = True
        try:
            wanted = [answer.wanted for answer in sampling]
            result: StepResult = await self._compute(self._runner.run, works, _draws(sampling), wanted)
        finally:
            self._stepping = False
        self._scheduler.advance(works)
        self._meters.count_step(works, result)
        if result.drawn is not None:
            self._hand_out(sampling, result)
        self._drop_aborted()

    def _hand_out(self, sampling: list[Answer], result: StepResult) -> None:
        assert result.drawn is not None
        drawn = result.drawn
        pairs = zip(sampling, drawn.ids_N.tolist(), drawn.logprobs_N.tolist(), result.decided, strict=True)
        for row, (answer, token, logprob, decided) in enumerate(pairs):
            reason = answer.take(token, logprob, drawn.kept.slice(row, row + 1), self._version, decided)
            if reason is not None:
                self._end(answer, reason)

    def _end(self, answer: Answer, reason: FinishReason) -> None:
        self._scheduler.remove(answer.sequence)
        del self._answers[answer.sequence.number]
        self._meters.count_reply(answer.sequence.num_prompt, answer.sequence.num_cached or 0)
        answer.finish(reason)

    def _abort(self, numbers: set[int]) -> None:
        self._aborted |= numbers
        if not self._stepping:
            self._drop_aborted()

    def _drop_aborted(self) -> None:
        for number in sorted(self._aborted & self._answers.keys()):
            self._end(self._answers[number], FinishReason.ABORT)
        self._aborted.clear()

    async def _change_weights(self, policy_version: int) -> None:
        weights = await asyncio.to_thread(self._reader.read, policy_version, self._weights)
        async with self._lease:
            try:
                await self._compute(self._runner.load, weights)
            except ValueError as error:
                raise EngineError(f"version {policy_version} does not fit the engine's model: {error}") from error
            self._fingerprint = await self._compute(fingerprint_of_model, self._model)
            self._weights, self._version = weights, policy_version
            if self._fingerprint != fingerprint(weights):
                self._refuse(
                    f"version {policy_version} is not what the model holds after loading it: restart the worker"
                )
                raise EngineError(self._refusal)
            self._scheduler.change_version(policy_version)

    async def _compute(self, function: Callable[..., R], *arguments: object) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _refuse(self, why: str) -> None:
        """Take no more requests and answer those that run; the first reason stays."""
        self._refusal = self._refusal or why
        for answer in self._answers.values():
            answer.fail(EngineError(self._refusal))
        self._answers.clear()


def _draws(sampling: list[Answer]) -> Draws:
    params = [answer.request.params for answer in sampling]
    streams = np.array([answer.stream for answer in sampling], np.uint64)
    positions = np.array([answer.sequence.num_sampled for answer in sampling], np.uint64)
    return Draws(
        temperatures_N=np.array([p.temperature for p in params]),
        top_ks_N=np.array([p.top_k for p in params], np.int64),
        top_ps_N=np.array([p.top_p for p in params]),
        uniforms_N=uniforms(streams, positions),
    )
