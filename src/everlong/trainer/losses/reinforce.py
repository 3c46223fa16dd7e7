"""Policy gradient:  L_t = -A_t log p_t

No ratio and no gate. Off-policy tokens are weighed by `ratio.correction` alone: with `double_sided` it is SAO's surrogate
(arXiv:2607.07508). Williams 1992.
"""

from __future__ import annotations

import torch

from everlong.trainer.losses.terms import LossTerms, Tokens


def reinforce(tokens: Tokens) -> LossTerms:
    return LossTerms(loss_T=-tokens.credit_T * tokens.logprobs_T, gate_T=torch.ones_like(tokens.credit_T))
