"""Our records as the bodies of vLLM's token-in, token-out endpoint, and its stream of chunks as our reply. Pure.

`POST /inference/v1/generate` of vLLM 0.32, `stream: true`. Nothing is filled in where the server left something out: a
reply with a logprob, a version or a reason missing is refused. Logprobs are those after temperature and truncation,
which the server gives with `--logprobs-mode processed_logprobs`; it writes -9999 for a token that truncation left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from everlong.contracts.errors import EngineError
from everlong.contracts.records import FinishReason, GenerateReply, GenerateRequest, SamplingParams
from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.engines.randomness import stream_of
from everlong.engines.stops import StopWatch

NO_LOGPROB = -9999.0
MIN_TEMPERATURE = 0.01
"""vLLM raises anything below to this without saying so in its reply."""
WHOLE_REPLY = 1 << 30
"""Tokens per chunk where nobody reads along."""
SPARE_CANDIDATES = 16
"""Asked for beyond twice top_k: tokens that tie with the last one that top-k keeps are kept too, and bfloat16 logits tie."""


class _Candidate(msgspec.Struct):
    token_id: int
    logprob: float


class _Position(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list[_Candidate] = []


class _Logprobs(msgspec.Struct):
    content: list[_Position] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    sampling_mask: list[list[int]] | None = None
    weight_versions: list[_Span] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Fault(msgspec.Struct):
    message: str


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Fault | None = None


def truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1


def check_supported(params: SamplingParams, *, returns_sampling_mask: bool) -> None:
    """Raises ValueError for what vLLM would sample otherwise, or could not account for."""
    if params.temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"vLLM raises a temperature below {MIN_TEMPERATURE} to it, got {params.temperature}: use top_k=1 for greedy "
            "decoding"
        )
    if params.top_p < 1 and not params.top_k and not returns_sampling_mask:
        raise ValueError(
            f"vLLM gives the kept set of top_p={params.top_p} only where top_k bounds it: set sampling.top_k as well"
        )


def num_candidates(params: SamplingParams, vocab_size: int) -> int:
    """How many of the likeliest tokens of each position hold the whole kept set; 0 where it is not read from them."""
    return min(2 * params.top_k + SPARE_CANDIDATES, vocab_size) if params.top_k else 0


def generate_body(
    request: GenerateRequest, *, wire_id: str, max_tokens: int, vocab_size: int, cache_salt: str
) -> dict[str, object]:
    """`cache_salt` keeps prompts computed under other weights out of the prefix cache."""
    params = request.params
    return {
        "request_id": wire_id,
        "token_ids": request.prompt_ids.tolist(),
        "cache_salt": cache_salt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "sampling_params": {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_tokens": max_tokens,
            "stop_token_ids": list(params.stop_ids),
            "ignore_eos": True,  # a turn ends where the run says, not where the model's files say
            "detokenize": False,
            "seed": stream_of(request.key) & (1 << 63) - 1,
            "logprobs": num_candidates(params, vocab_size),
            "stream_interval": 1 if params.stop_strings else WHOLE_REPLY,
        },
    }


class Transcript:
    """One request's chunks, on their way to a reply."""

    def __init__(self, request: GenerateRequest, token_bytes: Sequence[bytes]) -> None:
        self._request, self._vocab_size = request, len(token_bytes)
        # the server stops at ids itself
        self._watch = StopWatch(msgspec.structs.replace(request.params, stop_ids=()), token_bytes)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._kept: list[list[int]] = []
        self._spans: list[_Span] = []
        self._finish: str | None = None
        self._stop_match: int | str | None = None
        self._num_wanted: int | None = None
        """Tokens up to and with the one that completed a stop string; what came after it was never asked for."""
        self._num_cached = 0
        self._num_reported: int | None = None

    def feed(self, data: bytes | str) -> bool:
        """Take one chunk. True once the server need not go on. Raises EngineError for what no honest server sends."""
        try:
            chunk = msgspec.json.decode(data, type=_Chunk)
        except msgspec.DecodeError as error:
            raise self._refusal(f"sent a chunk that cannot be read ({error}): {data[:200]!r}") from error
        if chunk.error is not None:
            raise self._refusal(f"failed: {chunk.error.message}")
        if chunk.usage is not None:
            self._num_reported = chunk.usage.completion_tokens
            if chunk.usage.prompt_tokens_details is not None:
                self._num_cached = chunk.usage.prompt_tokens_details.cached_tokens or 0
        for choice in chunk.choices:
            self._take(choice)
        return self._num_wanted is not None

    def reply(self) -> GenerateReply:
        """Raises EngineError where something is missing."""
        reason = self._reason()
        num_unwanted = 0 if self._num_wanted is None else len(self._ids) - self._num_wanted
        versions = self._versions()[: self._num_wanted]
        try:
            columns = TokenColumns.sampled_tokens(
                self._ids[: self._num_wanted],
                self._logprobs[: self._num_wanted],
                version=versions,
                temperature=self._request.params.temperature,
                kept=KeptSets.from_rows(self._kept[: self._num_wanted]) if truncates(self._request.params) else None,
            )
        except ValueError as error:
            raise self._refusal(str(error)) from error
        return GenerateReply(
            request_id=self._request.request_id,
            columns=columns,
            finish_reason=reason,
            stop_match=self._stop_match,
            num_cached_tokens=self._num_cached,
            num_reported=None if self._num_reported is None else self._num_reported - num_unwanted,
        )

    def _take(self, choice: _Choice) -> None:
        ids = choice.token_ids or []
        positions = (choice.logprobs.content if choice.logprobs else None) or []
        if [position.token_id for position in positions] != ids:
            raise self._refusal(f"sent {len(ids)} ids with {len(positions)} logprobs, or for other ids")
        for index, position in enumerate(positions):
            self._ids.append(position.token_id)
            self._logprobs.append(self._logprob(position))
            if truncates(self._request.params):
                self._kept.append(self._kept_set(choice, index, position))
            if self._num_wanted is None and (match := self._watch.match(position.token_id)) is not None:
                self._stop_match, self._num_wanted = match, len(self._ids)
        if choice.weight_versions is not None:
            self._spans = choice.weight_versions
        if choice.finish_reason is not None:
            self._finish = choice.finish_reason
            if self._num_wanted is None:
                self._stop_match = choice.stop_reason

    def _logprob(self, position: _Position) -> float:
        if position.logprob <= NO_LOGPROB:
            raise self._refusal(f"sampled id {position.token_id} without a logprob")
        return min(position.logprob, 0.0)

    def _kept_set(self, choice: _Choice, index: int, position: _Position) -> list[int]:
        if choice.sampling_mask is not None:
            return choice.sampling_mask[index]
        candidates = position.top_logprobs
        kept = [candidate.token_id for candidate in candidates if candidate.logprob > NO_LOGPROB]
        if not candidates or (len(kept) == len(candidates) and len(candidates) < self._vocab_size):
            raise self._refusal(
                f"kept at least {len(kept)} tokens for top_k={self._request.params.top_k}, more than were asked for: the "
                "kept set is not known"
            )
        return kept

    def _reason(self) -> FinishReason:
        if self._num_wanted is not None:
            return FinishReason.STOP
        if self._finish not in ("stop", "length", "abort"):
            raise self._refusal(f"ended with finish_reason {self._finish!r}, expected stop, length or abort")
        if self._finish == "stop" and self._stop_match not in self._request.params.stop_ids:
            raise self._refusal(f"stopped at {self._stop_match!r}, which is none of {self._request.params.stop_ids}")
        return FinishReason(self._finish)

    def _versions(self) -> list[int]:
        """One per token. Raises EngineError where the spans leave a token out, or name no version of ours."""
        versions: list[int] = []
        for span in self._spans:
            if span.start != len(versions) or not span.version.isdecimal():
                raise self._refusal(f"gave version spans that do not fit: {self._spans}")
            versions += [int(span.version)] * (span.end - span.start)
        if len(versions) != len(self._ids):
            raise self._refusal(f"gave the version of {len(versions)} tokens and sampled {len(self._ids)}")
        return versions

    def _refusal(self, what: str) -> EngineError:
        return EngineError(f"request {self._request.request_id}: the vLLM server {what}")
