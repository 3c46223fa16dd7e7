"""The mismatch between engine and trainer, p0/q: weights against it, and what it measures before anything is clamped.

p0 are the trainer's logprobs before the first update (for loss reinforce: the current ones), q the engine's at sampling,
each token's of the policy version that sampled it. A rejected token contributes nothing and stays in the denominator.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everlong.contracts.records import EngineMismatch
from everlong.contracts.tokens import NO_ENGINE
from everlong.trainer.branches import Branches
from everlong.trainer.losses.terms import ratio_of
from everlong.trainer.ratio_config import (
    AnyCorrection,
    DoubleSidedMask,
    MisPo,
    NoCorrection,
    SequenceGeometric,
    SequenceProduct,
    TokenMask,
    TokenTruncation,
)

NO_BRANCHES = Branches(torch.zeros(0, dtype=torch.int64), 0)


@dataclass(frozen=True, slots=True)
class Correction:
    weights_T: Tensor
    """Detached, on the loss terms; 0 where rejected."""
    rejected: dict[str, Tensor] = field(default_factory=dict)
    """bool [T] by the filter that rejects: "token", "sequence"."""


def correct(log_mismatch_T: Tensor, branches: Branches, config: AnyCorrection) -> Correction:
    """Weights from log(p0/q).

    token_truncation: min(rho, cap) (Ionides 2008). token_mask: rho where low <= rho <= high, else 0 (arXiv:2510.18855).
    double_sided: the same between open bounds (arXiv:2607.07508). mis_po: 1 where rho and the geometric mean over the branch
    lie in their ranges, else 0 (arXiv:2602.10604). sequence_product, sequence_geometric: the product or the geometric mean
    over the branch, truncated or masked.
    """
    log_rho = log_mismatch_T.detach()
    match config:
        case NoCorrection():
            return Correction(torch.ones_like(log_rho))
        case TokenTruncation():
            return Correction(ratio_of(log_rho).clamp(max=torch.inf if config.cap is None else config.cap))
        case TokenMask():
            rho = ratio_of(log_rho)
            return _rejecting(rho, {"token": (rho < config.low) | (rho > config.high)})
        case DoubleSidedMask():
            rho = ratio_of(log_rho)
            return _rejecting(rho, {"token": (rho <= config.low) | (rho >= config.high)})
        case MisPo():
            filters = {
                "token": _outside(ratio_of(log_rho), config.token_low, config.token_high),
                "sequence": _outside(_geometric(log_rho, branches), config.sequence_low, config.sequence_high),
            }
            return _rejecting(torch.ones_like(log_rho), filters)
        case SequenceProduct():
            return _of_branches(ratio_of(branches.spread(branches.sums(log_rho), log_rho)), config)
        case SequenceGeometric():
            return _of_branches(_geometric(log_rho, branches), config)


def token_weights(log_mismatch_T: Tensor, config: AnyCorrection) -> Tensor:
    """Of a correction that looks at each token alone: what any id would weigh, sampled or not."""
    return correct(log_mismatch_T, NO_BRANCHES, config).weights_T


def off_policy(log_ratio_T: Tensor, credit_T: Tensor, branches: Branches, limit: float) -> Tensor:
    """bool [T]: tokens with negative credit on a branch whose mean log(q/p) exceeds `limit` (arXiv:2512.02556)."""
    distance_T = branches.spread(branches.means(-log_ratio_T.detach()), log_ratio_T)
    return (credit_T < 0) & (distance_T > limit)


def _of_branches(weights_T: Tensor, config: SequenceProduct | SequenceGeometric) -> Correction:
    if config.outside == "truncate":
        return Correction(weights_T.clamp(config.low, config.high))
    return _rejecting(weights_T, {"sequence": _outside(weights_T, config.low, config.high)})


def _geometric(log_rho_T: Tensor, branches: Branches) -> Tensor:
    return ratio_of(branches.spread(branches.means(log_rho_T), log_rho_T))


def _outside(values_T: Tensor, low: float | None, high: float | None) -> Tensor:
    below = values_T < (-torch.inf if low is None else low)
    return below | (values_T > (torch.inf if high is None else high))


def _rejecting(weights_T: Tensor, rejected: dict[str, Tensor]) -> Correction:
    for outside_T in rejected.values():
        weights_T = torch.where(outside_T, 0.0, weights_T)
    return Correction(weights_T, rejected)


FAR_PRODUCT = 0.6931471805599453
"""log 2: a branch whose product of ratios is further from 1 than a factor of 2 counts as far."""


def mismatch_metrics(log_mismatch_T: Tensor, branches: Branches) -> dict[str, float]:
    """Raw, in float64: largest and mean |log(p0/q)|, the k3 estimate of KL(q || p0), chi^2(p0 || q), the effective sample
    share, and how far the products over branches have gone.

    k3 = rho - 1 - log rho; chi^2 = mean rho^2 - 2 mean rho + 1. The effective share is (sum rho)^2 / (T sum rho^2), 1 where
    all weights are equal. Products are given as logarithms: log_product is the one furthest from 0, with its sign.
    """
    log_rho = log_mismatch_T.detach().double()
    rho = log_rho.exp()
    products_B = branches.sums(log_rho)
    return {
        "mismatch/max": float(log_rho.abs().max()),
        "mismatch/mean": float(log_rho.abs().mean()),
        "mismatch/kl": float((torch.expm1(log_rho) - log_rho).mean()),
        "mismatch/chi2": float(torch.expm1(log_rho).square().mean()),
        "mismatch/effective_share": float(rho.mean().square() / rho.square().mean()),
        "mismatch/log_product": float(products_B[products_B.abs().argmax()]),
        "mismatch/far_products": float((products_B.abs() > FAR_PRODUCT).double().mean()),
    }


def mismatch_by_engine(log_mismatch_T: Tensor, engines_T: np.ndarray, ages_T: np.ndarray) -> tuple[EngineMismatch, ...]:
    """Counts and sums of |log(p0/q)| of the tokens that say which engine of a pool sampled them."""
    distance_T = log_mismatch_T.detach().double().abs().numpy()
    found = []
    for engine, age in sorted(set(zip(engines_T.tolist(), ages_T.tolist(), strict=True))):
        if engine != NO_ENGINE:
            own_T = (engines_T == engine) & (ages_T == age)
            found.append(
                EngineMismatch(
                    engine=engine, age=age, num_tokens=int(own_T.sum()), total=float(distance_T[own_T].sum())
                )
            )
    return tuple(found)
