"""Estimates of the KL between the policy and a reference from one sampled token, with d = log p - log reference

k1 = d    k2 = d^2 / 2    k3 = exp(-d) + d - 1    unbiased = (p/q) (exp(-d) + d - 1)

Differentiated as a loss, over samples of p:  E[grad k1] = 0,  E[grad k2] = grad KL(p || reference),
E[grad k3] = grad KL(reference || p). unbiased goes through both factors: E_q = grad KL(p || reference) whatever policy q
sampled. Taken from the reward, k1 summed from a token to the end of its branch gives grad KL(p || reference); so summed, k3
gives grad KL(p || reference) - grad KL(reference || p). Schulman 2020; DeepSeek-V3.2 (arXiv:2512.02556).
d is cut at +-20, beyond which it has no gradient.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from everlong.trainer.losses.terms import MAX_LOG_RATIO, ratio_of

Estimator = Literal["k1", "k2", "k3", "unbiased"]


def kl_terms(logprobs_T: Tensor, reference_T: Tensor, log_to_sampler_T: Tensor, estimator: Estimator) -> Tensor:
    """Nats per token, [T]. `log_to_sampler_T` is log(p/q), which only the unbiased estimator reads."""
    d_T = (logprobs_T - reference_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    match estimator:
        case "k1":
            return d_T
        case "k2":
            return d_T.square() / 2
        case "k3":
            return torch.expm1(-d_T) + d_T
        case "unbiased":
            return ratio_of(log_to_sampler_T) * (torch.expm1(-d_T) + d_T)
