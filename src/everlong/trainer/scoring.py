"""The forward pass: a packed micro-batch through the model, and the logprobs of the rows that are wanted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everlong.contracts.records import MicroBatch
from everlong.models.centring import Weigh, expected_scores
from everlong.models.decisions import TokenDecide
from everlong.models.head import token_logprobs
from everlong.models.llama.model import Llama
from everlong.models.projection import Projection
from everlong.models.tree_pass import read_states
from everlong.trainer.replay import Rows, rows_of


@dataclass(frozen=True, slots=True)
class RowScores:
    """Of R rows, float32 [R]."""

    logprobs_R: Tensor
    """As the row was sampled: at its temperature, over its kept set."""
    entropy_R: Tensor
    """Of the untruncated distribution, detached."""
    full_R: Tensor
    """Logprob over the whole vocabulary; `logprobs_R` itself where nothing was truncated or nobody asked."""
    expected_R: Tensor | None = None
    """What the sampler expected of the weighted score; None where nobody asked."""


def score_rows(
    model: Llama,
    micro_batch: MicroBatch,
    rows: Rows,
    head_chunk_tokens: int,
    *,
    full: bool = False,
    weigh: Weigh | None = None,
    projection: Projection = "none",
    decide: TokenDecide | None = None,
) -> RowScores:
    """`projection`: of the logit gradient. `full`: the untruncated logprobs too, which costs a second pass through the head. `weigh`: the expected score of the sampler
    too, with these weights, which costs a pass over the kept ids. Without `decide` the network chooses for itself."""
    wants_full = full and rows.kept is not None
    weigh = weigh if rows.kept is not None else None

    def read(hidden_NM: Tensor, places_N: np.ndarray) -> tuple[Tensor, ...]:
        own = rows.take(places_N)
        of_rows = (model.head_weight, model.config, own.labels_R, own.temperatures_R)
        found = token_logprobs(hidden_NM, *of_rows, own.kept, model.numerics, head_chunk_tokens, projection)
        if wants_full:
            found += token_logprobs(hidden_NM, *of_rows, None, model.numerics, head_chunk_tokens, projection)[:1]
        if weigh is not None:
            found += (_expected(model, hidden_NM, own, weigh, head_chunk_tokens),)
        return found

    weights = list(model.trained_weights().values())
    logprobs_R, entropy_R, *others = read_states(model, weights, micro_batch, rows.predecessors_R.numpy(), read, decide)
    return RowScores(
        logprobs_R,
        entropy_R.detach(),
        others.pop(0) if wants_full else logprobs_R,
        others.pop(0) if weigh is not None else None,
    )


def _expected(model: Llama, hidden_NM: Tensor, rows: Rows, weigh: Weigh, head_chunk_tokens: int) -> Tensor:
    if rows.kept is None:
        return hidden_NM.new_zeros(len(rows))
    assert rows.kept_logprobs_K is not None, "refused before anything is computed"
    return expected_scores(
        hidden_NM, model.head_weight, rows.temperatures_R, rows.kept, rows.kept_logprobs_K, weigh, model.numerics,
        head_chunk_tokens,
    )  # fmt: skip


@torch.no_grad()
def score_micro_batch(
    model: Llama, micro_batch: MicroBatch, head_chunk_tokens: int, decide: TokenDecide | None = None
) -> np.ndarray:
    """float32[T]: logprob of every sampled or trainable token; NaN elsewhere and where nothing predicts the token."""
    columns = micro_batch.columns
    rows = rows_of(micro_batch, columns.sampled | columns.trainable)
    scores = np.full(len(columns), np.nan, np.float32)
    if len(rows):
        scores[rows.tokens] = score_rows(model, micro_batch, rows, head_chunk_tokens, decide=decide).logprobs_R.numpy()
    return scores
