"""What is known of a request while it runs, and the reply it becomes. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field

import numpy as np

from everlong.contracts.decisions import Decisions
from everlong.contracts.records import FinishReason, GenerateReply, GenerateRequest
from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.engines.randomness import stream_of
from everlong.engines.stops import StopWatch
from everlong.engines.torch_engine.scheduler import Sequence


@dataclass(slots=True, eq=False)
class Answer:
    """One request on its way to a reply."""

    request: GenerateRequest
    sequence: Sequence
    max_tokens: int
    stop_watch: StopWatch
    reply: asyncio.Future[GenerateReply]
    stream: int
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept: list[KeptSets] = field(default_factory=list)
    decided: list[Decisions] = field(default_factory=list)
    """Of one position after another, where the request wants them."""
    next_decided: int = 0
    """Position behind the last of these."""
    stop_match: int | str | None = None

    @property
    def wanted(self) -> int | None:
        """The first position whose decisions are wanted of the next step that samples; None where none are.

        The last token that the caller knows went through the network for this request only: the row that it leads to is new.
        """
        if not self.request.params.record:
            return None
        return max(self.next_decided, self.request.num_known - 1)

    @classmethod
    def to(cls, request: GenerateRequest, sequence: Sequence, max_tokens: int, token_bytes: Ordered[bytes]) -> Answer:
        future = asyncio.get_running_loop().create_future()
        watch = StopWatch(request.params, token_bytes)
        return cls(request, sequence, max_tokens, watch, future, stream_of(request.key))

    def take(
        self, token: int, logprob: float, kept: KeptSets, policy_version: int, decided: Decisions | None
    ) -> FinishReason | None:
        """One sampled token more; says whether and why it was the last. `decided` are the decisions that were wanted."""
        if decided is not None:
            self.decided.append(decided)
            self.next_decided = len(self.sequence.ids)
        self.sequence.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(policy_version)
        self.kept.append(kept if self.request.params.kept_logprobs else kept.without_logprobs())
        self.stop_match = self.stop_watch.match(token)
        if self.stop_match is not None:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.sequence.num_sampled == self.max_tokens else None

    def finish(self, reason: FinishReason) -> None:
        if self.reply.done():
            return  # the caller went away
        context, sampled = self._decisions()
        columns = TokenColumns.sampled_tokens(
            np.array(self.sequence.ids[self.sequence.num_prompt :], np.int32),
            np.array(self.logprobs, np.float32),
            version=np.array(self.versions, np.int32),
            temperature=self.request.params.temperature,
            kept=KeptSets.join(self.kept),
            decisions=sampled,
        )
        reply = GenerateReply(
            request_id=self.request.request_id,
            columns=columns,
            context=context,
            finish_reason=reason,
            stop_match=self.stop_match,
            num_cached_tokens=self.sequence.num_cached or 0,
            num_reported=self.sequence.num_sampled,
        )
        self.reply.set_result(reply)

    def _decisions(self) -> tuple[Decisions | None, Decisions | None]:
        """Of the prompt's tokens that the caller does not know, and of the sampled ones: a token's row is that of the position
        before it."""
        if not self.decided:
            return None, None
        nothing = [] if self.request.num_known else [Decisions(num_tokens=1)]
        rows = Decisions.join([*nothing, *self.decided]).only(self.request.params.record)
        num_context = self.sequence.num_prompt - self.request.num_known
        return rows.slice(0, num_context), rows.slice(num_context, len(rows))

    def fail(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)
