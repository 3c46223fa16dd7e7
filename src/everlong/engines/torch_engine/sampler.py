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

# N sampled tokens (one per sequence), V padded vocabulary


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
    mass = steady(torch.exp, logprobs).double().cumsum(-1)
    target = torch.from_numpy(draws.uniforms_N)[:, None] * mass[:, -1:]
    # the first id whose mass exceeds the target: its own probability is above 0, so it is kept and no padding
    ids = torch.searchsorted(mass, target, right=True).clamp_(max=vocab_size - 1)
    chosen = logprobs.gather(-1, ids)[:, 0]
    if not torch.isfinite(chosen).all():
        raise FloatingPointError(
            "the model's logits are not finite: its weights or its cache hold a NaN or an infinity"
        )
    return Drawn(ids[:, 0].numpy().astype(np.int32), chosen.numpy(), _kept_sets(keep, len(ids), vocab_size))


def _keep(logits_NV: Tensor, temperature_N: Tensor, draws: Draws) -> Tensor | None:
    rows = np.flatnonzero((draws.top_ks_N > 0) | (draws.top_ps_N < 1))
    if not rows.size:
        return None
    rows_t = torch.from_numpy(rows)
    top_k, top_p = torch.from_numpy(draws.top_ks_N[rows]), torch.from_numpy(draws.top_ps_N[rows].astype(np.float32))
    keep = torch.ones(logits_NV.shape, dtype=torch.bool)
    keep[rows_t] = truncate(logits_NV[rows_t], temperature_N[rows_t], top_k, top_p)
    return keep


def _kept_sets(keep_NV: Tensor | None, num_rows: int, vocab_size: int) -> KeptSets:
    if keep_NV is None:
        return KeptSets.empty(num_rows)
    keep = keep_NV.numpy()[:, :vocab_size]
    keep = keep & (keep.sum(1) < vocab_size)[:, None]
    offsets = np.zeros(num_rows + 1, np.int64)
    np.cumsum(keep.sum(1), out=offsets[1:])
    return KeptSets(ids=np.nonzero(keep)[1].astype(np.int32), offsets=offsets)
