"""Dr. GRPO: the clipped surrogate without what favours long answers and easy groups.

L = sum_i sum_t L_it / (B * constant_length): the mean over branches of sums, not of means; credit without deviation.
Liu et al. 2025 (arXiv:2503.20783).
"""

from __future__ import annotations

from everlong.trainer.loss_config import DrGrpoConfig
from everlong.trainer.losses.clipped import clipped
from everlong.trainer.losses.terms import LossTerms, Tokens


def dr_grpo(tokens: Tokens, config: DrGrpoConfig) -> LossTerms:
    return clipped(tokens, config.clip_low, config.clip_high)
