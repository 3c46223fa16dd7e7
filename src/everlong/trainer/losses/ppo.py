"""PPO: the clipped surrogate on each token's own ratio, with credit per token from a critic.

Schulman et al. 2017 (arXiv:1707.06347). Without dual clip; the critic's loss is no part of it: the critic has weights and steps of
its own.
"""

from __future__ import annotations

from everlong.trainer.loss_config import PpoConfig
from everlong.trainer.losses.clipped import clipped
from everlong.trainer.losses.terms import LossTerms, Tokens


def ppo(tokens: Tokens, config: PpoConfig) -> LossTerms:
    return clipped(tokens, config.clip_low, config.clip_high)
