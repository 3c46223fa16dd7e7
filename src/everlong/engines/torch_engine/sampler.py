"""From logits to tokens: the inverse of the cumulative distribution, in id order, at one given number per token.

A row's token depends on its own logits and number alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everlong.contracts.tokens import KeptSets
from everlong.models.head import processed_log_softmax, truncate
from everlong.models.numerics import steady

# N sampled tokens (one per sequence), V padded vocabulary, K ids that the row with the most keeps

NO_ID = -1


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """How each of N tokens is drawn."""

    temperatures_N: np.ndarray
    top_ks_N: np.ndarray
    top_ps_N: np.ndarray
    uniforms_N: np.ndarray
    """float64 in [0, 1)."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    ids_N: np.ndarray
    logprobs_N: np.ndarray
    """Of the processed distribution, from which the id was drawn."""
    kept: KeptSets
    """A row is empty where truncation removed no token of the vocabulary."""


def draw(logits_NV: Tensor, draws: Draws, vocab_size: int) -> Drawn:
    """Raises FloatingPointError where the logits are not finite."""
    temperature = torch.from_numpy(draws.temperatures_N.astype(np.float32))
    keep = _keep(logits_NV, temperature, draws)
    logprobs = processed_log_softmax(logits_NV, temperature, keep)
    uniforms = torch.from_numpy(draws.uniforms_N)
    if keep is None:
        ids, kept = _invert(logprobs, uniforms), KeptSets.empty(len(logprobs))
    else:
        ids_NK, kept = _kept_ids(keep, vocab_size, logprobs)
        masses_NK = logprobs.gather(-1, ids_NK.clamp(min=0)).masked_fill(ids_NK == NO_ID, -torch.inf)
        ids = ids_NK.gather(-1, _invert(masses_NK, uniforms)).clamp_(min=0)
    chosen = logprobs.gather(-1, ids)[:, 0]
    if not torch.isfinite(chosen).all():
        raise FloatingPointError(
            "the model's logits are not finite: its weights or its cache hold a NaN or an infinity"
        )
    return Drawn(ids[:, 0].numpy().astype(np.int32), chosen.numpy(), kept)


def _invert(logprobs_NK: Tensor, uniforms_N: Tensor) -> Tensor:
    """int64 [N, 1]: the first place whose cumulative mass exceeds the row's share of the whole."""
    mass = steady(torch.exp, logprobs_NK).double().cumsum(-1)
    target = uniforms_N[:, None] * mass[:, -1:]
    # its own probability is above 0, so the place is of a token that is kept and no padding
    return torch.searchsorted(mass, target, right=True).clamp_(max=mass.shape[-1] - 1)


def _keep(logits_NV: Tensor, temperature_N: Tensor, draws: Draws) -> Tensor | None:
    rows = np.flatnonzero((draws.top_ks_N > 0) | (draws.top_ps_N < 1))
    if not rows.size:
        return None
    rows_t = torch.from_numpy(rows)
    top_k, top_p = torch.from_numpy(draws.top_ks_N[rows]), torch.from_numpy(draws.top_ps_N[rows].astype(np.float32))
    keep = torch.ones(logits_NV.shape, dtype=torch.bool)
    keep[rows_t] = truncate(logits_NV[rows_t], temperature_N[rows_t], top_k, top_p)
    return keep


def _kept_ids(keep_NV: Tensor, vocab_size: int, logprobs_NV: Tensor) -> tuple[Tensor, KeptSets]:
    """int64 [N, K]: the ids of every row, ascending, and NO_ID behind them; and the same as recorded, with their logprobs."""
    keep = keep_NV.numpy()[:, :vocab_size]
    row, column = np.nonzero(keep)
    sizes = keep.sum(1)
    ends = sizes.cumsum()
    ids = np.full((len(keep), sizes.max(initial=1)), NO_ID, np.int64)
    ids[row, np.arange(len(row)) - np.repeat(ends - sizes, sizes)] = column
    cut = sizes < vocab_size
    offsets = np.concatenate([np.zeros(1, np.int64), np.where(cut, sizes, 0).cumsum()])
    row, column = row[np.repeat(cut, sizes)], column[np.repeat(cut, sizes)]
    kept = KeptSets(ids=column.astype(np.int32), offsets=offsets, logprobs=logprobs_NV.numpy()[row, column])
    return torch.from_numpy(ids), kept
