"""What a loss takes and returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""A ratio is cut at e**20, far outside every gate, so that it stays finite in float32."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """T trained tokens that the policy sampled."""

    logprobs_T: Tensor
    """Of the weights that are trained, with their gradient."""
    log_ratio_T: Tensor
    """Of those to the base, at the level of the loss: each token's own, or its branch's."""
    credit_T: Tensor


@dataclass(frozen=True, slots=True)
class LossTerms:
    loss_T: Tensor
    """To minimise, per token, without any denominator."""
    gate_T: Tensor
    """Detached, in [0, 1]: what the loss leaves of the gradient of ratio * credit. 1 is open, 0 clipped."""


def ratio_of(log_ratio_T: Tensor) -> Tensor:
    return log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
