"""The mismatch between engine and trainer, p0/q: weights against it, and what it measures before anything is clamped.

p0 are the trainer's logprobs before the first update, q the engine's at sampling. Per token only: products over a
sequence vanish with its length. A rejected token contributes nothing and stays in the denominator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from everlong.trainer.config import NoCorrection, TokenMask, TokenTruncation


def correction_weights(log_mismatch_T: Tensor, config: NoCorrection | TokenTruncation | TokenMask) -> Tensor:
    """Detached weights on the loss terms, [T], from log(p0/q).

    token_truncation: min(rho, cap), truncated importance sampling (Ionides 2008). token_mask: rho where low <= rho <= high, else 0
    (IcePop, arXiv:2510.18855).
    """
    rho = log_mismatch_T.detach().exp()
    match config:
        case NoCorrection():
            return torch.ones_like(rho)
        case TokenTruncation():
            return rho.clamp(max=config.cap)
        case TokenMask():
            return torch.where((rho >= config.low) & (rho <= config.high), rho, 0.0)


def mismatch_metrics(log_mismatch_T: Tensor) -> dict[str, float]:
    """Raw, in float64: largest and mean |log(p0/q)|, the k3 estimate of KL(q || p0), and the effective sample share.

    k3 = rho - 1 - log rho. The effective share is (sum rho)^2 / (T sum rho^2), 1 where all weights are equal.
    """
    log_rho = log_mismatch_T.detach().double()
    rho = log_rho.exp()
    return {
        "mismatch/max": float(log_rho.abs().max()),
        "mismatch/mean": float(log_rho.abs().mean()),
        "mismatch/kl": float((torch.expm1(log_rho) - log_rho).mean()),
        "mismatch/effective_share": float(rho.mean().square() / rho.square().mean()),
    }
