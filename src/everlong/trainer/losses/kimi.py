"""Kimi K2.5's objective:  L_t = -clip(r_t, ratio_min, ratio_max) A_t + pull * log(r_t)**2

The clip knows no sign: outside the range the first term has no gradient, and the second pulls the policy back to the base.
Kimi Team 2026 (arXiv:2602.02276), whose mean is over the tokens of a group, then over groups, with the plain group mean as
baseline (credit.scale none).
"""

from __future__ import annotations

from everlong.trainer.loss_config import KimiConfig
from everlong.trainer.losses.terms import MAX_LOG_RATIO, LossTerms, Tokens, ratio_of


def kimi(tokens: Tokens, config: KimiConfig) -> LossTerms:
    ratio_T = ratio_of(tokens.log_ratio_T)
    inside_T = (ratio_T >= config.ratio_min) & (ratio_T <= config.ratio_max)
    surrogate_T = ratio_T.clamp(config.ratio_min, config.ratio_max) * tokens.credit_T
    pull_T = config.pull * tokens.log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square()
    return LossTerms(loss_T=pull_T - surrogate_T, gate_T=inside_T.detach().to(ratio_T.dtype))
