"""One episode's conversation: messages in, messages out, and below them token ids that are never encoded twice.

`conversation.py` makes the prompts and keeps the tree; here are the calls, their limits and their accounts.

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
from everlong.rollouts.config import ThinkingHistory
from everlong.rollouts.gateway.conversation import Conversation, Prompt
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
    num_thinking_tokens: int = 0
    """Of the sampled ones."""
    malformed: bool = False
    turn: int = -1

    @property
    def cut(self) -> bool:
        """Whether the turn ended at its limit of tokens."""
        return self.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class Pending:
    """A turn that was sampled and is not yet recorded: nobody has read it."""

    prompt: Prompt
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
        thinking: ThinkingHistory = "keep",
    ) -> None:
        self.order = order
        self._engine, self._renderer, self._params = engine, renderer, params
        self._run_seed, self._limits, self._journal = run_seed, limits, journal
        self._conversation = Conversation(renderer, thinking)
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
        return self._conversation.tree.turns

    @property
    def num_forks(self) -> int:
        """Prompts that left a stored turn half-way: somebody rewrote the history."""
        return self._conversation.tree.num_forks

    @property
    def num_stripped(self) -> int:
        """Prompts that began a branch without earlier thinking, as `strip_and_branch` asks."""
        return self._conversation.num_stripped

    async def close(self) -> None:
        """No further model calls. One in flight is aborted; when this returns its tokens are accounted for."""
        self.closed.set()
        async with self.lock:
            """Whoever held it has recorded or discarded."""

    async def chat(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> ChatReply:
        """Sample the next turn and record it. Raises ContextFull, TurnLimit, SessionClosed, EngineError."""
        async with self.lock:
            return await self.record(await self.sample(messages, tools))

    async def sample(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), *, calls: bool = True
    ) -> Pending:
        """Sample the next turn without recording it; follow with `record` or `discard`. Without `calls` the answer is text."""
        if not messages:
            raise ValueError("a chat needs at least one message")
        try:
            pending = await self._sample(messages, tools, calls)
        except Exception as error:
            self.refusal = error
            raise
        self.refusal = None
        return pending

    def count(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> int:
        """Tokens that the prompt of these messages would have; nothing is sampled."""
        return len(self._conversation.prompt(messages, tools).ids)

    async def record(self, pending: Pending) -> ChatReply:
        """Put a sampled turn into the tree, once the journal holds it. A cancellation waits for the end."""
        return await _to_the_end(self._record(pending))

    async def discard(self, pending: Pending, reason: str) -> None:
        """Keep a sampled turn out of the tree: the client was gone before it read it."""
        await _to_the_end(self._discard(len(pending.reply.columns), reason))

    async def _sample(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], calls: bool) -> Pending:
        if self.closed.is_set():
            raise SessionClosed(f"episode {self.order.episode} has ended: no further model calls")
        if self._num_calls >= self._limits.max_turns:
            raise TurnLimit(f"episode {self.order.episode} has made its {self._limits.max_turns} model calls")
        prompt = self._conversation.prompt(messages, tools)
        request = self._request(prompt.ids)
        self._num_calls += 1
        reply = await self._generate(request)
        await self._check(request, reply)
        cut = reply.finish_reason is FinishReason.LENGTH
        ids = reply.columns.ids.tolist()
        parsed = self._renderer.parse(ids, self._num_calls - 1, cut=cut, calls=calls)
        self.num_cut_calls += cut and parsed.malformed
        answer = Message(
            role="assistant", content=parsed.content, reasoning=parsed.reasoning, tool_calls=parsed.tool_calls
        )
        chat = ChatReply(
            message=answer,
            finish_reason=reply.finish_reason,
            num_prompt_tokens=len(prompt.ids),
            num_sampled_tokens=len(ids),
            num_thinking_tokens=self._renderer.thinking(ids).num_sampled if parsed.reasoning else 0,
            num_cached_tokens=reply.num_cached_tokens,
            malformed=parsed.malformed,
        )
        return Pending(prompt, reply, chat)

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
        turn = len(self.turns)
        await self._journal.turn_sampled(self.order, turn, len(pending.reply.columns))
        chat = pending.chat
        self._conversation.add(pending.prompt, pending.reply, chat.message, malformed=chat.malformed and not chat.cut)
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
            num_known=self._conversation.tree.num_known(prompt_ids) if params.record else 0,
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
        if reply.context is not None:
            reply.context.check()
    except ValueError as error:
        return str(error)
    return _undecided(request, reply)


def _undecided(request: GenerateRequest, reply: GenerateReply) -> str | None:
    """What is missing of the decisions that the request wants: earlier turns have those of the tokens it says are known, so
    with the reply's there must be one row for every token but the first of a root."""
    num_context = len(request.prompt_ids) - request.num_known
    for name in request.params.record:
        context = np.zeros(0, bool) if reply.context is None else reply.context.known(name)
        if len(context) != num_context:
            return f"the engine gave {name} of {len(context)} prompt tokens, and {num_context} are new to the session"
        known = np.concatenate([context, reply.columns.decisions.known(name)])
        missing = int((~known[0 if request.num_known else 1 :]).sum())
        if missing:
            return f"the engine gave no {name} of {missing} of the {len(known)} tokens of prompt and answer"
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
