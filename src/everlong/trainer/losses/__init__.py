"""Surrogate losses, one pure file each: log ratios and credit in, one term per token out, never a mean."""

from __future__ import annotations

from torch import Tensor

from everlong.trainer.config import GrpoConfig, SapoConfig
from everlong.trainer.losses.grpo import grpo
from everlong.trainer.losses.sapo import sapo
from everlong.trainer.losses.terms import LossTerms

__all__ = ["LossTerms", "surrogate"]


def surrogate(log_ratio_T: Tensor, credit_T: Tensor, config: SapoConfig | GrpoConfig) -> LossTerms:
    """The terms of the configured loss."""
    match config:
        case SapoConfig():
            return sapo(log_ratio_T, credit_T, config.tau_positive, config.tau_negative)
        case GrpoConfig():
            return grpo(log_ratio_T, credit_T, config.clip_low, config.clip_high, config.dual_clip)
