"""GRPO: the clipped surrogate with separate bounds and a dual clip, at the level of a token or of a branch.

Shao et al. 2024 (arXiv:2402.03300). Differs from the paper: no KL term (`kl` adds one), and the upper bound is its own.
"""

from __future__ import annotations

from everlong.trainer.loss_config import GrpoConfig
from everlong.trainer.losses.clipped import clipped
from everlong.trainer.losses.terms import LossTerms, Tokens


def grpo(tokens: Tokens, config: GrpoConfig) -> LossTerms:
    return clipped(tokens, config.clip_low, config.clip_high, config.dual_clip)
