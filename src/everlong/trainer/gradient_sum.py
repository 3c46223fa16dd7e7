"""Gradients summed by micro-batch index in a fixed binary tree, so that the sum does not depend on who computed what when."""

from __future__ import annotations

from torch import Tensor

Gradient = list[Tensor]
"""One tensor per parameter, in the order of the parameters."""


class GradientSum:
    """Leaf i of the tree is micro-batch i; two siblings merge as soon as both are there.

    Pushed in the order of the index it holds log2(n) gradients, like the digits of a binary counter. It takes over the
    tensors it is given and writes to them. A micro-batch without gradient is pushed as None and counts as zero.
    """

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, int], Gradient | None] = {}
        self._num_pushed = 0

    @property
    def nodes(self) -> dict[tuple[int, int], Gradient | None]:
        """What has not yet met its sibling, by level and index: node (l, i) is the sum of the 2^l leaves from i 2^l on."""
        return self._nodes

    def push(self, index: int, gradient: Gradient | None, level: int = 0) -> None:
        """`level`: of a node whose leaves another sum has added up already."""
        self._num_pushed += 1 << level
        while (level, index ^ 1) in self._nodes:
            gradient = _add(self._nodes.pop((level, index ^ 1)), gradient)
            level, index = level + 1, index >> 1
        self._nodes[level, index] = gradient

    def close(self, num_micro_batches: int) -> Gradient | None:
        """The sum; None where no micro-batch had a gradient. Raises ValueError unless each was pushed exactly once."""
        levels = [level for level in range(num_micro_batches.bit_length()) if num_micro_batches >> level & 1]
        expected = {(level, (num_micro_batches >> level) - 1) for level in levels}
        if self._num_pushed != num_micro_batches or self._nodes.keys() != expected:
            raise ValueError(
                f"expected the gradients of micro-batches 0 to {num_micro_batches - 1} once each, got {self._num_pushed} "
                "with some missing or twice"
            )
        total: Gradient | None = None
        for node in sorted(self._nodes):
            total = _add(self._nodes[node], total)
        return total


def _add(left: Gradient | None, right: Gradient | None) -> Gradient | None:
    if left is None or right is None:
        return right if left is None else left
    for mine, other in zip(left, right, strict=True):
        mine.add_(other)
    return left
