"""From a micro-batch's record to the rows that are scored: which token, predicted by which, as it was sampled.

Temperatures and kept sets come from the record and are never decided again: a recomputed set may lack the sampled token
(sampling masks, arXiv:2512.02556 §3.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everlong.contracts.records import MicroBatch, Segment
from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.models.llama.config import LlamaConfig

# T tokens of the micro-batch, R scored rows, K kept ids over all rows


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of a micro-batch whose logprob is wanted."""

    tokens: np.ndarray
    """int64[R], ascending."""
    predecessors_R: Tensor
    """The token whose hidden state predicts the row's: the one before it on the path to its root."""
    labels_R: Tensor
    temperatures_R: Tensor
    kept: tuple[Tensor, Tensor] | None
    """(ids, offsets) of the rows' kept sets; None where none is recorded."""
    kept_logprobs_K: Tensor | None = None
    """The sampler's, of those ids; None where they are not recorded."""

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, places: np.ndarray) -> Rows:
        """Some of the rows, int64[N] of them, in that order."""
        if np.array_equal(places, np.arange(len(self))):
            return self
        index, kept, kept_logprobs = torch.from_numpy(places), self.kept, self.kept_logprobs_K
        if kept is not None:
            where, offsets = _kept_places(kept[1].numpy(), places)
            ids = kept[0][torch.from_numpy(where)]
            kept = (ids, torch.from_numpy(offsets)) if len(where) else None
            kept_logprobs = None if kept_logprobs is None else kept_logprobs[torch.from_numpy(where)]
        return Rows(
            tokens=self.tokens[places],
            predecessors_R=self.predecessors_R[index],
            labels_R=self.labels_R[index],
            temperatures_R=self.temperatures_R[index],
            kept=kept,
            kept_logprobs_K=kept_logprobs,
        )


def rows_of(micro_batch: MicroBatch, wanted_T: np.ndarray) -> Rows:
    """The wanted tokens that something predicts; the first token of a root has no logprob."""
    columns = micro_batch.columns
    before = predecessors(micro_batch.segments, len(columns))
    tokens = np.flatnonzero(wanted_T & (before >= 0))
    temperatures = np.where(columns.sampled, columns.temperatures, np.float32(1))[tokens]
    return Rows(
        tokens=tokens,
        predecessors_R=torch.from_numpy(before[tokens]),
        labels_R=torch.from_numpy(columns.ids[tokens].astype(np.int64)),
        temperatures_R=torch.from_numpy(temperatures),
        kept=_kept_rows(columns.kept, tokens),
        kept_logprobs_K=_kept_logprobs(columns.kept, tokens),
    )


def predecessors(segments: Sequence[Segment], num_tokens: int) -> np.ndarray:
    """int64[T]: the token before each on the path to its root, -1 for the first of a root."""
    before = np.arange(num_tokens) - 1
    lasts: list[int] = []
    for segment in segments:
        last = lasts[segment.parent] if segment.parent >= 0 else -1
        if segment.length:
            before[segment.start] = last
            last = segment.start + segment.length - 1
        lasts.append(last)
    return before


def episode_of_token(segments: Sequence[Segment], num_tokens: int) -> np.ndarray:
    """int64[T]: index of the episode that owns each token, -1 for a shared prompt."""
    owners = np.full(num_tokens, -1)
    for segment in segments:
        owners[segment.start : segment.start + segment.length] = segment.episode
    return owners


def branch_of_token(segments: Sequence[Segment], num_tokens: int) -> np.ndarray:
    """int64[T]: which of its episode's branches trains each token."""
    branches = np.zeros(num_tokens, np.int64)
    for segment in segments:
        branches[segment.start : segment.start + segment.length] = segment.branch
    return branches


def trained_tokens(columns: TokenColumns) -> np.ndarray:
    """bool[T]: supervised tokens, and sampled ones whose mask is on and whose credit is a number."""
    return columns.trainable & (~columns.sampled | np.isfinite(columns.credit))


def check_micro_batch(index: int, micro_batch: MicroBatch, model: LlamaConfig) -> None:
    """Raises ValueError for a record that the model cannot take, or a sampled token without what it was sampled with."""
    columns, name = micro_batch.columns, f"micro-batch {index}"
    if sum(segment.length for segment in micro_batch.segments) != len(columns):
        raise ValueError(f"segments of {name} do not tile its {len(columns)} tokens: pack it again")
    outside = np.flatnonzero((columns.ids < 0) | (columns.ids >= model.vocab_size))
    if outside.size:
        raise ValueError(
            f"token {outside[0]} of {name} has id {columns.ids[outside[0]]}, the model knows 0 to {model.vocab_size - 1}: "
            "the episode was made with another tokenizer"
        )
    longest = int(micro_batch.positions().max(initial=-1)) + 1
    if longest > model.max_positions:
        raise ValueError(f"a branch of {name} has {longest} tokens, the model takes {model.max_positions}")
    good = np.isfinite(columns.logprobs) & (columns.temperatures > 0) & np.isfinite(columns.temperatures)
    bare = np.flatnonzero(columns.sampled & trained_tokens(columns) & ~good)
    if bare.size:
        raise ValueError(
            f"sampled token {bare[0]} of {name} has logprob {columns.logprobs[bare[0]]} and temperature "
            f"{columns.temperatures[bare[0]]}: both must be recorded at sampling, they are never filled in later"
        )
    lacking = columns.outside_kept()
    lacking = lacking[(columns.sampled & trained_tokens(columns))[lacking]]
    if lacking.size:
        raise ValueError(
            f"kept set of token {lacking[0]} of {name} lacks the sampled id {columns.ids[lacking[0]]}: sets are recorded at "
            "sampling and replayed as they are, so the record is of another token"
        )


def _kept_rows(kept: KeptSets, tokens: np.ndarray) -> tuple[Tensor, Tensor] | None:
    places, offsets = _kept_places(kept.offsets, tokens)
    return (torch.from_numpy(kept.ids[places]), torch.from_numpy(offsets)) if len(places) else None


def _kept_logprobs(kept: KeptSets, tokens: np.ndarray) -> Tensor | None:
    return None if kept.logprobs is None else torch.from_numpy(kept.logprobs[_kept_places(kept.offsets, tokens)[0]])


def _kept_places(ends: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the tokens' kept ids stand, and how they fall into rows; `ends` are the offsets of all tokens."""
    sizes = np.diff(ends)[tokens]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return np.repeat(ends[tokens] - offsets[:-1], sizes) + np.arange(offsets[-1]), offsets
