"""GSPO: the clipped surrogate on the ratio of a whole branch,  s = exp(mean_t (log p_t - log q_t))

The mean runs over the branch's trained tokens, never over what tools wrote. `gspo` differentiates s, so that each token has
1/n of its gradient; `gspo_token` takes the value of s and the gradient of each token's own ratio. Both are the same where
the credit is one number per branch. Zheng et al. 2025 (arXiv:2507.18071). Which of the two is in the log ratio:
`Branches.at_level`.
"""

from __future__ import annotations

from everlong.trainer.loss_config import GspoConfig, GspoTokenConfig
from everlong.trainer.losses.clipped import clipped
from everlong.trainer.losses.terms import LossTerms, Tokens


def gspo(tokens: Tokens, config: GspoConfig | GspoTokenConfig) -> LossTerms:
    return clipped(tokens, config.clip_low, config.clip_high)
