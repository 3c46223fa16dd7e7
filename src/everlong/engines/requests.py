"""Which requests can run at all. The same rules for every engine."""

from __future__ import annotations

import math
from collections.abc import Collection

from everlong.contracts.errors import StaleWeights
from everlong.contracts.records import GenerateRequest, SamplingParams
from everlong.contracts.tokens import NO_VERSION


def check_request(request: GenerateRequest, *, vocab_size: int, context: int, decisions: Collection[str] = ()) -> int:
    """Tokens the request may sample: `max_tokens`, less where the context has less room. `decisions` are those that the engine
    can record. Raises ValueError."""
    ids, num_prompt = request.prompt_ids, len(request.prompt_ids)
    if not num_prompt:
        raise ValueError(f"request {request.request_id} has an empty prompt: give at least one token")
    if num_prompt + 1 > context:
        raise ValueError(
            f"request {request.request_id} has a prompt of {num_prompt} tokens, and with one sampled token it must fit "
            f"into a context of {context}: shorten or compact the prompt"
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise ValueError(f"request {request.request_id} holds id {wrong}, the vocabulary is 0 to {vocab_size - 1}")
    _check_params(request.params, vocab_size)
    if unknown := [name for name in request.params.record if name not in decisions]:
        raise ValueError(
            f"request {request.request_id} wants {', '.join(unknown)} recorded, and this engine records "
            f"{', '.join(decisions) or 'no decisions'}: take a model and an engine that do, or set replay.routes to none"
        )
    if not 0 <= request.num_known <= num_prompt:
        raise ValueError(f"request {request.request_id} says that {request.num_known} of {num_prompt} tokens are known")
    return min(request.params.max_tokens, context - num_prompt)


def check_version(request: GenerateRequest, held: int) -> None:
    """Raises StaleWeights when the engine holds an older version than the request needs."""
    if request.min_policy_version > held:
        have = "holds no published version yet" if held == NO_VERSION else f"is at {held}"
        raise StaleWeights(
            f"request {request.request_id} needs policy version {request.min_policy_version}, the engine {have}: "
            "update it first"
        )


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    if not (params.temperature > 0 and math.isfinite(params.temperature)):
        raise ValueError(
            f"temperature must be finite and above 0, got {params.temperature}: greedy decoding is top_k=1"
        )
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p must be above 0 and at most 1, got {params.top_p}")
    if params.top_k < 0:
        raise ValueError(f"top_k must be at least 0 (0 keeps all), got {params.top_k}")
    if params.max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {params.max_tokens}")
    if any(not 0 <= stop < vocab_size for stop in params.stop_ids):
        raise ValueError(
            f"stop_ids {params.stop_ids} leave the vocabulary 0 to {vocab_size - 1}: they would never match"
        )
    if "" in params.stop_strings:
        raise ValueError("stop_strings holds an empty string, which would match everywhere")
