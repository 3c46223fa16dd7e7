"""CISPO:  L_t = -sg(clamp(r_t, ratio_min, ratio_max)) A_t log p_t

sg stops the gradient: a clipped token still teaches, with a bounded weight. MiniMax 2025 (arXiv:2506.13585). Differs from
the paper: bounds are ratios, not distances from 1, and the mean is the one `loss.reduction` names.
"""

from __future__ import annotations

from everlong.trainer.loss_config import CispoConfig
from everlong.trainer.losses.terms import LossTerms, Tokens, ratio_of


def cispo(tokens: Tokens, config: CispoConfig) -> LossTerms:
    ratio_T = ratio_of(tokens.log_ratio_T.detach())
    weight_T = ratio_T.clamp(config.ratio_min, config.ratio_max)
    return LossTerms(loss_T=-weight_T * tokens.credit_T * tokens.logprobs_T, gate_T=(weight_T / ratio_T).clamp(max=1.0))
