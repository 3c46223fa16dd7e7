"""One episode's conversation: messages in, messages out, and below them token ids that are never encoded twice.

A prompt is the stored ids of the turn that the messages continue, plus a bridge for what is new. Messages that continue
no stored turn are rendered whole; then the tree decides by token ids whether that is a fork. Every sampled token is
told to the journal before the agent sees it: as a turn, or as discarded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from everlong.contracts.errors import EngineError, EverlongError, RequestAborted
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


@dataclass(frozen=True, slots=True)
class Pending:
    """A turn that was sampled and is not yet recorded: nobody has read it."""

    messages: tuple[Message, ...]
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
        self._spoken: list[tuple[Message, ...]] = []
        """Per turn, every message up to and with its answer."""
        self._num_calls = 0
        self._closed = False
        self.num_discarded = 0
        self.lock = asyncio.Lock()
        """Held from a request to its record: turns of one session never overlap."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self._tree.turns

    @property
    def num_forks(self) -> int:
        return self._tree.num_forks

    def close(self) -> None:
        self._closed = True

    async def chat(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> ChatReply:
        """Sample the next turn and record it. Raises ContextFull, TurnLimit, SessionClosed, EngineError."""
        async with self.lock:
            return await self.record(await self.sample(messages, tools))

    async def sample(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Pending:
        """Sample the next turn without recording it; follow with `record` or `discard`."""
        if self._closed:
            raise SessionClosed(f"episode {self.order.episode} has ended: no further model calls")
        if self._num_calls >= self._limits.max_turns:
            raise TurnLimit(f"episode {self.order.episode} has made its {self._limits.max_turns} model calls")
        if not messages:
            raise ValueError("a chat needs at least one message")
        prompt_ids = self._prompt(messages, tools)
        request = self._request(prompt_ids)
        self._num_calls += 1
        reply = await self._engine.generate(request)
        await self._check(request, reply)
        parsed = self._renderer.parse(reply.columns.ids.tolist(), self._num_calls - 1)
        answer = Message(role="assistant", content=parsed.content, tool_calls=parsed.tool_calls)
        chat = ChatReply(
            message=answer,
            finish_reason=reply.finish_reason,
            num_prompt_tokens=len(prompt_ids),
            num_sampled_tokens=len(reply.columns),
            num_cached_tokens=reply.num_cached_tokens,
            malformed=parsed.malformed,
        )
        return Pending(tuple(messages), prompt_ids, reply, chat)

    async def record(self, pending: Pending) -> ChatReply:
        """Put a sampled turn into the tree, once the journal holds it."""
        turn = len(self._tree.turns)
        await self._journal.turn_sampled(self.order, turn, len(pending.reply.columns))
        reply = pending.reply
        self._tree.add(pending.prompt_ids, reply.columns, reply.finish_reason, reply.request_id)
        self._spoken.append((*pending.messages, pending.chat.message))
        return ChatReply(**{f: getattr(pending.chat, f) for f in ChatReply.__struct_fields__ if f != "turn"}, turn=turn)

    async def discard(self, pending: Pending, reason: str) -> None:
        """Keep a sampled turn out of the tree: the client was gone before it read it."""
        await self._discard(len(pending.reply.columns), reason)

    async def _discard(self, num_tokens: int, reason: str) -> None:
        if num_tokens:
            await self._journal.tokens_discarded(self.order, num_tokens, reason)
            self.num_discarded += num_tokens

    def _prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> np.ndarray:
        turn = self._continued(messages)
        if turn is None:
            return np.asarray(self._renderer.render(messages, tools), np.int32)
        stored = self._tree.columns(self._tree.turns[turn])
        sampled = self._tree.turns[turn].sampled.ids
        last = int(sampled[-1]) if len(sampled) else None
        bridge = self._renderer.bridge(last, messages[len(self._spoken[turn]) :])
        return np.concatenate([stored.ids, np.asarray(bridge, np.int32)])

    def _continued(self, messages: Sequence[Message]) -> int | None:
        """The turn with the longest history that the messages repeat and go beyond."""
        best = None
        for turn, spoken in enumerate(self._spoken):
            goes_on = len(spoken) < len(messages)
            longest = best is None or len(spoken) >= len(self._spoken[best])
            if goes_on and longest and all(a.same_as(b) for a, b in zip(spoken, messages, strict=False)):
                best = turn
        return best

    def _request(self, prompt_ids: np.ndarray) -> GenerateRequest:
        room = self._limits.max_context - len(prompt_ids)
        if room < 1:
            raise ContextFull(
                f"the prompt has {len(prompt_ids)} tokens and the context {self._limits.max_context}: no room for an answer"
            )
        fields = {f: getattr(self._params, f) for f in SamplingParams.__struct_fields__}
        params = SamplingParams(**{**fields, "max_tokens": min(self._params.max_tokens, room)})
        order = self.order
        return GenerateRequest(
            request_id=f"{order.episode}.{order.incarnation}.{self._num_calls}",
            key=SamplingKey(run_seed=self._run_seed, episode=order.episode, turn=self._num_calls),
            prompt_ids=prompt_ids,
            params=params,
            min_policy_version=order.min_policy_version,
        )

    async def _check(self, request: GenerateRequest, reply: GenerateReply) -> None:
        """Refuse a reply whose streams are not one sampled token per id; what it sampled is discarded, not lost."""
        columns = reply.columns
        problem = None
        if reply.request_id != request.request_id:
            problem = f"the engine answered {reply.request_id!r} to {request.request_id!r}"
        elif not columns.sampled.all() or not np.isfinite(columns.logprobs).all():
            problem = "a token of the answer has no logprob"
        elif len(columns) and (columns.ids.min() < 0 or columns.ids.max() >= self._renderer.tokenizer.vocab_size):
            problem = f"the answer holds id {columns.ids.max()} beyond the vocabulary of {self._renderer.tokenizer.vocab_size}"
        elif not len(columns) and reply.finish_reason is not FinishReason.ABORT:
            problem = "the engine sampled nothing"
        if problem is not None:
            await self._discard(len(columns), "refused")
            raise EngineError(f"episode {self.order.episode}, call {self._num_calls - 1}: {problem}")
        if reply.finish_reason is FinishReason.ABORT:
            await self._discard(len(columns), "aborted")
            raise RequestAborted(f"{request.request_id} was aborted after {len(columns)} tokens")
