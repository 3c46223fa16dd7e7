"""One episode's conversation: messages in, messages out, and below them token ids that are never encoded twice.

A prompt is the stored ids of the turn that the messages continue, plus a bridge for what is new. Messages that continue
no stored turn are rendered whole; then the tree decides by token ids whether that is a fork.

Every sampled token is told to the journal, as a turn or as discarded, also when the caller is cancelled half-way; where
an engine broke or fell silent and the number cannot be known, the call is told instead. An
agent in this process sees an answer after that; over HTTP the answer is delivered first, and the next call waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from everlong.contracts.errors import EngineError, EverlongError, RequestAborted, StaleWeights
from everlong.contracts.ports import Engine
from everlong.contracts.records import (
    EpisodeOrder,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    Record,
    SamplingKey,
    SamplingParams,
    Turn,
)
from everlong.rollouts.messages import Message
from everlong.rollouts.renderers.chatml import Renderer
from everlong.trajectories.tree import EpisodeTree

T = TypeVar("T")

ABORT_GRACE_S = 5.0
"""How long a cancelled call waits for what the engine had sampled until then; an engine answers within one step."""


class ContextFull(EverlongError):
    """The prompt leaves no room for an answer."""


class TurnLimit(EverlongError):
    """The session has made as many model calls as the run allows."""


class SessionClosed(EverlongError):
    """The episode has ended."""


class Journal(Protocol):
    """Who is told of every sampled token, and answers when that is durable."""

    async def turn_sampled(self, order: EpisodeOrder, turn: int, num_tokens: int) -> None: ...

    async def tokens_discarded(self, order: EpisodeOrder, num_tokens: int, reason: str) -> None: ...

    async def call_uncounted(self, order: EpisodeOrder, max_tokens: int, reason: str) -> None:
        """A call ended and nobody can say how many tokens, up to `max_tokens`, the engine had sampled for it."""
        ...


class SessionLimits(Record, frozen=True, kw_only=True):
    max_turns: int
    max_context: int
    """Tokens of prompt and answer together."""


class ChatReply(Record, frozen=True, kw_only=True):
    message: Message
    finish_reason: FinishReason
    num_prompt_tokens: int
    num_sampled_tokens: int
    num_cached_tokens: int = 0
    malformed: bool = False
    turn: int = -1

    @property
    def cut(self) -> bool:
        """Whether the turn ended at its limit of tokens."""
        return self.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class _Spoken:
    """What has been said up to and with a turn's answer, and the tools that were offered."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]

    def opens(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> bool:
        """Whether the messages repeat this and go beyond."""
        return (
            len(self.messages) < len(messages)
            and self.tools == tuple(tools)
            and all(mine.same_as(theirs) for mine, theirs in zip(self.messages, messages, strict=False))
        )


@dataclass(frozen=True, slots=True)
class Pending:
    """A turn that was sampled and is not yet recorded: nobody has read it."""

    spoken: _Spoken
    prompt_ids: np.ndarray
    reply: GenerateReply
    chat: ChatReply


class Session:
    def __init__(
        self,
        order: EpisodeOrder,
        *,
        engine: Engine,
        renderer: Renderer,
        params: SamplingParams,
        run_seed: int,
        limits: SessionLimits,
        journal: Journal,
    ) -> None:
        self.order = order
        self._engine, self._renderer, self._params = engine, renderer, params
        self._run_seed, self._limits, self._journal = run_seed, limits, journal
        self._tree = EpisodeTree()
        self._spoken: list[_Spoken] = []
        """One per turn."""
        self._num_calls = 0
        self.num_discarded = 0
        self.num_uncounted = 0
        """Calls that ended without saying how many tokens they had sampled."""
        self.num_cut_calls = 0
        """Turns that ended at their limit within a tool call, which therefore did not run."""
        self.refusal: Exception | None = None
        """Why the last call gave no answer; None after one that did. An agent may keep it to itself, the runner asks."""
        self.closed = asyncio.Event()
        self.lock = asyncio.Lock()
        """Held from a request to its record: turns of one session never overlap."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self._tree.turns

    @property
    def num_forks(self) -> int:
        return self._tree.num_forks

    async def close(self) -> None:
        """No further model calls. One in flight is aborted; when this returns its tokens are accounted for."""
        self.closed.set()
        async with self.lock:
            """Whoever held it has recorded or discarded."""

    async def chat(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> ChatReply:
        """Sample the next turn and record it. Raises ContextFull, TurnLimit, SessionClosed, EngineError."""
        async with self.lock:
            return await self.record(await self.sample(messages, tools))

    async def sample(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Pending:
        """Sample the next turn without recording it; follow with `record` or `discard`."""
        if not messages:
            raise ValueError("a chat needs at least one message")
        try:
            pending = await self._sample(messages, tools)
        except Exception as error:
            self.refusal = error
            raise
        self.refusal = None
        return pending

    async def record(self, pending: Pending) -> ChatReply:
        """Put a sampled turn into the tree, once the journal holds it. A cancellation waits for the end."""
        return await _to_the_end(self._record(pending))

    async def discard(self, pending: Pending, reason: str) -> None:
        """Keep a sampled turn out of the tree: the client was gone before it read it."""
        await _to_the_end(self._discard(len(pending.reply.columns), reason))

    async def _sample(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Pending:
        if self.closed.is_set():
            raise SessionClosed(f"episode {self.order.episode} has ended: no further model calls")
        if self._num_calls >= self._limits.max_turns:
            raise TurnLimit(f"episode {self.order.episode} has made its {self._limits.max_turns} model calls")
        prompt_ids = self._prompt(messages, tools)
        request = self._request(prompt_ids)
        self._num_calls += 1
        reply = await self._generate(request)
        await self._check(request, reply)
        cut = reply.finish_reason is FinishReason.LENGTH
        parsed = self._renderer.parse(reply.columns.ids.tolist(), self._num_calls - 1, cut=cut)
        self.num_cut_calls += cut and parsed.malformed
        answer = Message(
            role="assistant", content=parsed.content, reasoning=parsed.reasoning, tool_calls=parsed.tool_calls
        )
        chat = ChatReply(
            message=answer,
            finish_reason=reply.finish_reason,
            num_prompt_tokens=len(prompt_ids),
            num_sampled_tokens=len(reply.columns),
            num_cached_tokens=reply.num_cached_tokens,
            malformed=parsed.malformed,
        )
        return Pending(_Spoken((*messages, answer), tuple(tools)), prompt_ids, reply, chat)

    async def _generate(self, request: GenerateRequest) -> GenerateReply:
        generation = asyncio.ensure_future(self._engine.generate(request))
        closing = asyncio.ensure_future(self.closed.wait())
        try:
            await asyncio.wait({generation, closing}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await _to_the_end(self._abandon(request, generation))
            raise
        finally:
            closing.cancel()
        if not generation.done():
            await _to_the_end(self._abandon(request, generation))
            raise SessionClosed(f"episode {self.order.episode} ended while {request.request_id} was sampled")
        try:
            return generation.result()
        except ValueError as error:
            raise EngineError(f"the engine refused {request.request_id}: {error}") from error
        except EngineError as error:
            await _to_the_end(self._uncounted(request, error))
            raise

    async def _abandon(self, request: GenerateRequest, generation: asyncio.Future[GenerateReply]) -> None:
        """Nobody waits for the answer any more: make the engine stop, and account for what it had sampled."""
        aborting = asyncio.ensure_future(self._engine.abort((request.request_id,)))
        await asyncio.wait({aborting, generation}, timeout=ABORT_GRACE_S)
        aborting.cancel()
        generation.cancel()
        ended, _ = await asyncio.gather(generation, aborting, return_exceptions=True)
        if isinstance(ended, GenerateReply):
            await self._discard(len(ended.columns), "aborted")
        else:
            await self._uncounted(request, ended)

    async def _record(self, pending: Pending) -> ChatReply:
        turn = len(self._tree.turns)
        await self._journal.turn_sampled(self.order, turn, len(pending.reply.columns))
        reply = pending.reply
        self._tree.add(pending.prompt_ids, reply.columns, reply.finish_reason, reply.request_id)
        self._spoken.append(pending.spoken)
        return msgspec.structs.replace(pending.chat, turn=turn)

    async def _uncounted(self, request: GenerateRequest, ended: BaseException) -> None:
        """Tell of a call whose engine broke or, cancelled after the grace, said nothing. Stale weights and a refused
        request sampled nothing; what a dead worker had sampled ends with the incarnation."""
        silent = isinstance(ended, asyncio.CancelledError)
        if silent or (isinstance(ended, EngineError) and not isinstance(ended, StaleWeights)):
            reason = "engine_silent" if silent else "engine_failure"
            await self._journal.call_uncounted(self.order, request.params.max_tokens, reason)
            self.num_uncounted += 1

    async def _discard(self, num_tokens: int, reason: str) -> None:
        if num_tokens:
            await self._journal.tokens_discarded(self.order, num_tokens, reason)
            self.num_discarded += num_tokens

    def _prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> np.ndarray:
        turn = self._continued(messages, tools)
        if turn is None:
            return np.asarray(self._renderer.render(messages, tools), np.int32)
        stored = self._tree.columns(self._tree.turns[turn])
        last = int(stored.ids[-1])
        bridge = self._renderer.bridge(last, messages[len(self._spoken[turn].messages) :])
        return np.concatenate([stored.ids, np.asarray(bridge, np.int32)])

    def _continued(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> int | None:
        """The turn with the longest history that the messages repeat and go beyond; of equal ones the latest."""
        longest_first = sorted(range(len(self._spoken)), key=lambda t: (len(self._spoken[t].messages), t), reverse=True)
        return next((turn for turn in longest_first if self._spoken[turn].opens(messages, tools)), None)

    def _request(self, prompt_ids: np.ndarray) -> GenerateRequest:
        room = self._limits.max_context - len(prompt_ids)
        if room < 1:
            raise ContextFull(
                f"the prompt has {len(prompt_ids)} tokens and the context {self._limits.max_context}: no room for an answer"
            )
        params = msgspec.structs.replace(self._params, max_tokens=min(self._params.max_tokens, room))
        order = self.order
        return GenerateRequest(
            request_id=f"{order.episode}.{order.incarnation}.{self._num_calls}",
            key=SamplingKey(run_seed=self._run_seed, episode=order.episode, turn=self._num_calls),
            prompt_ids=prompt_ids,
            params=params,
            min_policy_version=order.min_policy_version,
        )

    async def _check(self, request: GenerateRequest, reply: GenerateReply) -> None:
        """Refuse a reply that cannot be what was sampled for the request; its tokens are discarded, not lost."""
        problem = _problem(request, reply, self._renderer.tokenizer.vocab_size)
        if problem is not None:
            await _to_the_end(self._discard(len(reply.columns), "refused"))
            raise EngineError(f"episode {self.order.episode}, call {request.key.turn}: {problem}")
        if reply.finish_reason is FinishReason.ABORT:
            await _to_the_end(self._discard(len(reply.columns), "aborted"))
            raise RequestAborted(f"{request.request_id} was aborted after {len(reply.columns)} tokens")


def _problem(request: GenerateRequest, reply: GenerateReply, vocab_size: int) -> str | None:
    """What an honest engine would not have answered."""
    ids, asked = reply.columns.ids, request.params
    if reply.request_id != request.request_id:
        return f"the engine answered {reply.request_id!r} to {request.request_id!r}"
    if not len(ids):
        return None if reply.finish_reason is FinishReason.ABORT else "the engine sampled nothing"
    if reply.num_reported not in (None, len(ids)):
        return f"the engine reported {reply.num_reported} sampled tokens but gave {len(ids)} ids: some were lost on the way"
    if len(ids) > asked.max_tokens:
        return f"the engine sampled {len(ids)} tokens and was allowed {asked.max_tokens}"
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        return f"the answer holds id {wrong}, beyond the vocabulary of {vocab_size}"
    try:
        columns = reply.columns.replace()  # makes the record check the length of its streams again
        if not columns.sampled.all():
            return "the answer holds tokens that were not sampled"
        EpisodeTree().add(request.prompt_ids, columns, reply.finish_reason)
    except ValueError as error:
        return str(error)
    return None


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await to the end whatever happens; a cancellation meanwhile takes effect then. A half-told fact would stop the run."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break  # the task's own, raised below
    if cancelled is not None and task.exception() is None:
        raise cancelled
    return task.result()
