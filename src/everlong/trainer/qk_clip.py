"""QK-clip: after a step, heads whose attention logits grew beyond a bound are scaled back

gamma_h = min(1, bound / S_h)        S_h = highest logit of head h over the tokens of the step

A head with a key projection of its own has queries and keys times sqrt(gamma); where several query heads share a key head the
keys stay as they are, since they are the other heads' too, and the queries take the whole gamma. Either way the head's logits
shrink by gamma. Kimi K2 (arXiv:2507.20534, section 2.1), where the keys that heads share are the rotary part. Differs from the paper:
S_h counts only the keys that a query sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

# H query heads, G key-value heads


def qk_clip_factors(highest_H: Tensor, bound: float, num_kv_heads: int) -> tuple[Tensor, Tensor]:
    """What each head's query rows and each key head's rows are multiplied by, float32 [H] and [G]."""
    gamma_H = (bound / highest_H.float().clamp(min=bound)).nan_to_num(nan=1.0)
    if len(highest_H) == num_kv_heads:
        return gamma_H.sqrt(), gamma_H.sqrt()
    return gamma_H, torch.ones(num_kv_heads)


@torch.no_grad()
def scale_heads(weight_RM: Tensor, factors_H: Tensor) -> None:
    """Multiply each head's rows, in place."""
    weight_RM.view(len(factors_H), -1, weight_RM.shape[-1]).mul_(factors_H[:, None, None])
