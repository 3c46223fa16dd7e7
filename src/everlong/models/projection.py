"""Zero-sum projection of the gradient of a row's logits:  g <- g - mean over S of g

S are the ids that can be sampled: the kept set, else the vocabulary without its padding. In exact arithmetic the gradient of a
log-softmax sums to 0. Where the largest logit leads by more than 23 log 2 in float32, the others vanish in its sum: the label's own
gradient becomes exactly 0 and the rest stays above 0. What is left moves all rows of the head one way, step after step, until the
loss spikes (arXiv:2605.06152). `mean` is the paper's projection. `exact_target` gives the label what the others have without it,
g_label = -sum of the others, which is what it would be without rounding, where the mean spreads the error over all of S.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# T rows, V ids that have a logit

Projection = Literal["none", "mean", "exact_target"]


def zero_sum(gradient_TV: Tensor, active: Tensor | int, labels_T: Tensor, projection: Projection) -> Tensor:
    """float32 [T, V], written in place. `active`: bool [T, V] of each row's ids, or how many ids from the first every row has;
    outside them the gradient is 0 and stays it. A row with one id has gradient exactly 0."""
    if projection == "none":
        return gradient_TV
    if projection == "exact_target":
        others_T = gradient_TV.scatter(-1, labels_T[:, None], 0.0).sum(-1)
        return gradient_TV.scatter_(-1, labels_T[:, None], -others_T[:, None])
    if isinstance(active, int):
        gradient_TV[:, :active] -= gradient_TV[:, :active].mean(-1, keepdim=True)
        return gradient_TV
    mean_T = gradient_TV.sum(-1, keepdim=True) / active.sum(-1, keepdim=True)
    return gradient_TV.sub_(torch.where(active, mean_T, 0.0))
