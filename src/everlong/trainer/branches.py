"""The branches of a micro-batch as the trainer sees them: which trained tokens belong together, and sums over them.

A token belongs to the branch that trains it, in the order of its path; what a branch shares with an earlier one is not in
its sums. Every sum is taken in float64, since a branch may have a million tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everlong.trainer.loss_config import Level

# T trained tokens that the policy sampled, B branches


@dataclass(frozen=True, slots=True)
class Branches:
    index_T: Tensor
    """int64, which branch trains the token."""
    num: int

    @staticmethod
    def join(parts: Sequence[Branches]) -> Branches:
        """The branches of all parts, none of which continues in another."""
        starts = [sum(part.num for part in parts[:i]) for i in range(len(parts))]
        indices = [part.index_T + start for part, start in zip(parts, starts, strict=True)]
        return Branches(torch.cat(indices), sum(part.num for part in parts))

    def sums(self, values_T: Tensor) -> Tensor:
        """float64 [B]"""
        return torch.zeros(self.num, dtype=torch.float64).index_add(0, self.index_T, values_T.double())

    def means(self, values_T: Tensor) -> Tensor:
        """float64 [B]; a branch without tokens has 0."""
        return self.sums(values_T) / self.sums(torch.ones_like(values_T.detach())).clamp(min=1)

    def spread(self, values_B: Tensor, like: Tensor) -> Tensor:
        """Each branch's value at each of its tokens, [T] in the type of `like`."""
        return values_B[self.index_T].to(like.dtype)

    def to_go(self, values_T: Tensor) -> Tensor:
        """Sum from each token to the end of its branch, itself included, [T]."""
        order = torch.argsort(self.index_T, stable=True)
        ordered = values_T.double()[order]
        ends = self.sums(values_T).cumsum(0)
        to_go = torch.empty_like(ordered)
        to_go[order] = ends[self.index_T[order]] - ordered.cumsum(0) + ordered
        return to_go.to(values_T.dtype)

    def at_level(self, log_ratio_T: Tensor, level: Level) -> Tensor:
        """Log ratios [T] of each token, of its branch (the mean), or with the branch's value and the token's gradient."""
        if level == "token":
            return log_ratio_T
        mean_T = self.spread(self.means(log_ratio_T), log_ratio_T)
        return mean_T if level == "sequence" else mean_T.detach() + log_ratio_T - log_ratio_T.detach()
