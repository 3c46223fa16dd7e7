"""Soft adaptive policy optimisation:  L_t = -f(r_t) A_t,  f(r) = (4 / tau) * sigmoid(tau (r - 1))

r_t = exp(log ratio); tau = tau_positive where A_t > 0, else tau_negative. f'(r) = sech^2(tau (r - 1) / 2) is 1 at r = 1
and falls off smoothly on both sides. Gao et al. 2025 (arXiv:2511.20347), whose reduction is the sequence mean.
The value at r = 1 is 2 / tau, so it differs between the signs of A: only the gradient means something.
"""

from __future__ import annotations

import torch

from everlong.trainer.loss_config import SapoConfig
from everlong.trainer.losses.terms import LossTerms, Tokens, ratio_of


def sapo(tokens: Tokens, config: SapoConfig) -> LossTerms:
    log_ratio_T, credit_T = tokens.log_ratio_T, tokens.credit_T
    positive, negative = log_ratio_T.new_tensor(config.tau_positive), log_ratio_T.new_tensor(config.tau_negative)
    tau_T = torch.where(credit_T > 0, positive, negative)
    gate_T = torch.sigmoid(tau_T * (ratio_of(log_ratio_T) - 1))
    soft = gate_T.detach()
    return LossTerms(loss_T=-4 / tau_T * gate_T * credit_T, gate_T=4 * soft * (1 - soft))
