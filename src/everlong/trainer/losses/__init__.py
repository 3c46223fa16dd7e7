"""Surrogate losses, one pure file each: log ratios and credit in, one term per token out, never a mean."""

from __future__ import annotations

from everlong.trainer.loss_config import (
    AnyLoss,
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    GspoTokenConfig,
    KimiConfig,
    PpoConfig,
    ReinforceConfig,
    SapoConfig,
)
from everlong.trainer.losses.cispo import cispo
from everlong.trainer.losses.dapo import dapo
from everlong.trainer.losses.dr_grpo import dr_grpo
from everlong.trainer.losses.grpo import grpo
from everlong.trainer.losses.gspo import gspo
from everlong.trainer.losses.kimi import kimi
from everlong.trainer.losses.ppo import ppo
from everlong.trainer.losses.reinforce import reinforce
from everlong.trainer.losses.sapo import sapo
from everlong.trainer.losses.terms import LossTerms, Tokens

__all__ = ["LossTerms", "Tokens", "surrogate"]


def surrogate(tokens: Tokens, config: AnyLoss) -> LossTerms:
    """The terms of the configured loss."""
    match config:
        case ReinforceConfig():
            return reinforce(tokens)
        case GrpoConfig():
            return grpo(tokens, config)
        case PpoConfig():
            return ppo(tokens, config)
        case DrGrpoConfig():
            return dr_grpo(tokens, config)
        case DapoConfig():
            return dapo(tokens, config)
        case CispoConfig():
            return cispo(tokens, config)
        case GspoConfig() | GspoTokenConfig():
            return gspo(tokens, config)
        case SapoConfig():
            return sapo(tokens, config)
        case KimiConfig():
            return kimi(tokens, config)
