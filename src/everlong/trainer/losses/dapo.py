"""DAPO: the clipped surrogate with a higher upper bound, under the mean over all tokens of the batch.

Yu et al. 2025 (arXiv:2503.14476). Its dynamic sampling is `admission.zero_signal`, its overlong filter
`admission.overlong`, its soft punishment `credit.overlong`.
"""

from __future__ import annotations

from everlong.trainer.loss_config import DapoConfig
from everlong.trainer.losses.clipped import clipped
from everlong.trainer.losses.terms import LossTerms, Tokens


def dapo(tokens: Tokens, config: DapoConfig) -> LossTerms:
    return clipped(tokens, config.clip_low, config.clip_high)
