"""The forward pass: a packed micro-batch through the model, and the logprobs of the rows that are wanted."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from everlong.contracts.records import MicroBatch
from everlong.models.attention import TreeAttention
from everlong.models.head import token_logprobs
from everlong.models.llama.model import Llama
from everlong.trainer.replay import Rows, rows_of


def score_rows(model: Llama, micro_batch: MicroBatch, rows: Rows, head_chunk_tokens: int) -> tuple[Tensor, Tensor]:
    """Logprob of each row as it was sampled, and the entropy of the untruncated distribution, both float32 [R]."""
    segments = [(segment.parent, segment.start, segment.length) for segment in micro_batch.segments]
    attend = TreeAttention(segments, model.config.head_dim**-0.5, model.numerics)
    ids = torch.from_numpy(micro_batch.columns.ids.astype(np.int64))
    positions = torch.from_numpy(micro_batch.positions().astype(np.int64))
    hidden_TM = model(ids, positions, attend)
    return token_logprobs(
        hidden_TM[rows.predecessors_R], model.head_weight, model.config, rows.labels_R, rows.temperatures_R, rows.kept,
        model.numerics, head_chunk_tokens,
    )  # fmt: skip


@torch.no_grad()
def score_micro_batch(model: Llama, micro_batch: MicroBatch, head_chunk_tokens: int) -> np.ndarray:
    """float32[T]: logprob of every sampled or trainable token; NaN elsewhere and where nothing predicts the token."""
    columns = micro_batch.columns
    rows = rows_of(micro_batch, columns.sampled | columns.trainable)
    scores = np.full(len(columns), np.nan, np.float32)
    if len(rows):
        scores[rows.tokens] = score_rows(model, micro_batch, rows, head_chunk_tokens)[0].numpy()
    return scores
