"""Clipped surrogate:  L_t = -min(r_t A_t, clip(r_t, 1 - low, 1 + high) A_t);  for A_t < 0 never more than dual * |A_t|

r_t = exp(log ratio). Written as -A_t clamp(r_t, low(A_t), high(A_t)), which is the same: above 0 only the upper bound
binds, below 0 only the lower one and the dual clip (Ye et al. 2020, arXiv:1912.09729).
"""

from __future__ import annotations

import torch

from everlong.trainer.losses.terms import LossTerms, Tokens, ratio_of


def clipped(tokens: Tokens, clip_low: float, clip_high: float, dual_clip: float | None = None) -> LossTerms:
    """`dual_clip` None: no bound on the ratio where the credit is negative."""
    ratio_T, credit_T = ratio_of(tokens.log_ratio_T), tokens.credit_T
    nothing, dual = ratio_T.new_tensor(0.0), ratio_T.new_tensor(torch.inf if dual_clip is None else dual_clip)
    lowest_T = torch.where(credit_T < 0, ratio_T.new_tensor(1 - clip_low), nothing)
    highest_T = torch.where(credit_T > 0, ratio_T.new_tensor(1 + clip_high), dual)
    inside_T = (ratio_T >= lowest_T) & (ratio_T <= highest_T)
    return LossTerms(loss_T=-credit_T * torch.clamp(ratio_T, lowest_T, highest_T), gate_T=inside_T.detach().to(ratio_T))
