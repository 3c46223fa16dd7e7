"""The highest attention logit of every head, which fused attention never shows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everlong.models.llama.model import Attend

# T tokens, H query heads, G key-value heads, D head width, L layers, Q queries of a piece, S keys of a path

PIECE = 128
"""Queries whose logits exist at a time: memory grows with this times the longest path."""


class HighestLogits:
    """Gathers the maximum over all pairs of query and key that see each other, while forward passes run."""

    def __init__(self, num_layers: int, num_heads: int) -> None:
        self.highest_LH = torch.full((num_layers, num_heads), -torch.inf)

    def over(self, attend: Attend, segments: Sequence[tuple[int, int, int]], scale: float) -> Attend:
        """The same attention over segments (parent index or -1, start, length), which is watched."""
        paths = [_path(segment, segments) for segment in segments if segment[2]]

        def watched(layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
            with torch.no_grad():
                for path_S, length in paths:
                    own = _highest(q_THD[path_S[-length:]], k_TGD[path_S], scale)
                    self.highest_LH[layer] = torch.maximum(self.highest_LH[layer], own)
            return attend(layer, q_THD, k_TGD, v_TGD)

        return watched


def _path(segment: tuple[int, int, int], segments: Sequence[tuple[int, int, int]]) -> tuple[Tensor, int]:
    """Indices of the tokens from the root to the segment's end, and how many are its own."""
    length, parts = segment[2], [torch.arange(segment[1], segment[1] + segment[2])]
    while segment[0] >= 0:
        segment = segments[segment[0]]
        parts.append(torch.arange(segment[1], segment[1] + segment[2]))
    return torch.cat(parts[::-1]), length


def _highest(q_QHD: Tensor, k_SGD: Tensor, scale: float) -> Tensor:
    """float32 [H], of the last Q of S positions, each of which sees those up to its own."""
    num_queries, heads, width = q_QHD.shape
    num_keys, groups = k_SGD.shape[:2]
    keys = k_SGD.float().permute(1, 2, 0)
    highest = torch.full((heads,), -torch.inf)
    for start in range(0, num_queries, PIECE):
        piece = q_QHD[start : start + PIECE].float()
        rows = piece.view(len(piece), groups, -1, width).permute(1, 2, 0, 3).reshape(groups, -1, width)
        logits = (rows @ keys).view(heads, len(piece), num_keys) * scale
        own = num_keys - num_queries + start + torch.arange(len(piece))
        ahead = torch.arange(num_keys) > own[:, None]
        highest = torch.maximum(highest, logits.masked_fill_(ahead, -torch.inf).amax((1, 2)))
    return highest
