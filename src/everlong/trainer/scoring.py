"""The forward pass: a packed micro-batch through the model, and the logprobs of the rows that are wanted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everlong.contracts.records import MicroBatch
from everlong.models.attention import TreeAttention
from everlong.models.centring import Weigh, expected_scores
from everlong.models.decisions import Decide
from everlong.models.head import token_logprobs
from everlong.models.llama.model import Llama
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


def hidden_states(model: Llama, micro_batch: MicroBatch, decide: Decide | None = None) -> Tensor:
    """float32 [T, M], of every token behind what stands before it on its path. Without `decide` the network chooses for itself."""
    segments = [(segment.parent, segment.start, segment.length) for segment in micro_batch.segments]
    attend = TreeAttention(segments, model.config.head_dim**-0.5, model.numerics)
    ids = torch.from_numpy(micro_batch.columns.ids.astype(np.int64))
    positions = torch.from_numpy(micro_batch.positions().astype(np.int64))
    return model(ids, positions, attend) if decide is None else model(ids, positions, attend, decide)


def score_rows(
    model: Llama,
    micro_batch: MicroBatch,
    rows: Rows,
    head_chunk_tokens: int,
    *,
    full: bool = False,
    weigh: Weigh | None = None,
    decide: Decide | None = None,
) -> RowScores:
    """`full`: the untruncated logprobs too, which costs a second pass through the head. `weigh`: the expected score of the sampler
    too, with these weights, which costs a pass over the kept ids."""
    hidden_TM = hidden_states(model, micro_batch, decide)
    hidden_RM = hidden_TM[rows.predecessors_R]

    def logprobs(kept: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        return token_logprobs(
            hidden_RM, model.head_weight, model.config, rows.labels_R, rows.temperatures_R, kept, model.numerics,
            head_chunk_tokens,
        )  # fmt: skip

    logprobs_R, entropy_R = logprobs(rows.kept)
    full_R = logprobs(None)[0] if full and rows.kept is not None else logprobs_R
    expected_R = None
    if weigh is not None and rows.kept is not None:
        assert rows.kept_logprobs_K is not None, "refused before anything is computed"
        expected_R = expected_scores(
            hidden_RM, model.head_weight, rows.temperatures_R, rows.kept, rows.kept_logprobs_K, weigh, model.numerics,
            head_chunk_tokens,
        )  # fmt: skip
    return RowScores(logprobs_R, entropy_R, full_R, expected_R)


@torch.no_grad()
def score_micro_batch(
    model: Llama, micro_batch: MicroBatch, head_chunk_tokens: int, decide: Decide | None = None
) -> np.ndarray:
    """float32[T]: logprob of every sampled or trainable token; NaN elsewhere and where nothing predicts the token."""
    columns = micro_batch.columns
    rows = rows_of(micro_batch, columns.sampled | columns.trainable)
    scores = np.full(len(columns), np.nan, np.float32)
    if len(rows):
        scores[rows.tokens] = score_rows(model, micro_batch, rows, head_chunk_tokens, decide=decide).logprobs_R.numpy()
    return scores
