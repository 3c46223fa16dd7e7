"""The highest attention logit of every head, which fused attention never shows."""

from __future__ import annotations

import torch
from torch import Tensor

# H query heads, G key-value heads, D head width, Q queries, S keys of their path

PIECE = 128
"""Queries whose logits exist at a time: memory grows with this times the longest path."""


@torch.no_grad()
def highest_logits(q_QHD: Tensor, k_SGD: Tensor, scale: float, *, is_causal: bool = True) -> Tensor:
    """float32 [H]. Causal: of the last Q of S positions, each of which sees those up to its own. Else every query sees every key."""
    num_queries, heads, width = q_QHD.shape
    num_keys, groups = k_SGD.shape[:2]
    keys = k_SGD.float().permute(1, 2, 0)
    highest = torch.full((heads,), -torch.inf)
    for start in range(0, num_queries, PIECE):
        piece = q_QHD[start : start + PIECE].float()
        rows = piece.view(len(piece), groups, -1, width).permute(1, 2, 0, 3).reshape(groups, -1, width)
        logits = (rows @ keys).view(heads, len(piece), num_keys) * scale
        if not is_causal:
            highest = torch.maximum(highest, logits.amax((1, 2)))
            continue
        own = num_keys - num_queries + start + torch.arange(len(piece))
        ahead = torch.arange(num_keys) > own[:, None]
        highest = torch.maximum(highest, logits.masked_fill_(ahead, -torch.inf).amax((1, 2)))
    return highest
