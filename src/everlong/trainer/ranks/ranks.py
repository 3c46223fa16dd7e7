"""What a trainer sees of its ranks: which micro-batches are its own, which tensors, and how the others' parts come together.

Nothing here decides a bit: gradients are added up in the tree of `GradientSum` whoever computed them, and a tensor is stepped
whole by the one rank that owns it, so that the number of ranks changes no update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Protocol, TypeVar

from torch import Size, Tensor

from everlong.trainer.gradient_sum import Gradient, GradientSum

T = TypeVar("T")

OwnedGradient = list[Tensor | None]
"""One per parameter, in the order of the parameters; None where another rank owns it."""


class Ranks(Protocol):
    """Every rank calls the same methods in the same order. A rank that is gone makes every method raise in the others."""

    rank: int
    size: int

    def together(self, name: str, argument: object) -> AbstractContextManager[None]:
        """What the first rank does within, the others do too. Raises WorkerDied where one of them is gone."""
        ...

    def close(self) -> None:
        """The first rank ends the others. Idempotent."""
        ...

    def share(self, num_micro_batches: int) -> range:
        """Those that this rank computes; every one is somebody's."""
        ...

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of the ranks."""
        ...

    def sum(
        self, gradients: GradientSum, present: Sequence[bool], owners: Sequence[int], shapes: Sequence[Size]
    ) -> OwnedGradient | None:
        """Of all ranks, for the parameters that are owned here; None where no micro-batch had a gradient.

        `gradients` holds those of `share`; `present` says of every micro-batch whether it has one; `owners` and `shapes` are
        of the parameters.
        """
        ...

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Write the owner's bits into everybody's tensors."""
        ...

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Everybody's tensors on the first rank; on the others their own."""
        ...


class Alone:
    """One process that does it all."""

    rank, size = 0, 1

    def together(self, name: str, argument: object) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        """There is nothing to end."""

    def share(self, num_micro_batches: int) -> range:
        return range(num_micro_batches)

    def gather(self, value: T) -> list[T]:
        return [value]

    def sum(
        self, gradients: GradientSum, present: Sequence[bool], owners: Sequence[int], shapes: Sequence[Size]
    ) -> OwnedGradient | None:
        total = gradients.close(len(present))
        return None if total is None else [*total]

    def spread(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """There is nobody else."""

    def collect(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(tensors)


ALONE = Alone()


def shares(num_micro_batches: int, num_ranks: int) -> list[range]:
    """Neighbours go together, so that a rank adds up most of its gradients itself."""
    ends = [num_micro_batches * rank // num_ranks for rank in range(num_ranks + 1)]
    return [range(start, end) for start, end in pairwise(ends)]


def nodes_of(share: range) -> list[tuple[int, int]]:
    """Levels and indices of the tree's nodes that hold exactly these leaves, in order."""
    nodes, start = [], share.start
    while start < share.stop:
        level = (start & -start).bit_length() - 1 if start else share.stop.bit_length()
        while start + (1 << level) > share.stop:
            level -= 1
        nodes.append((level, start >> level))
        start += 1 << level
    return nodes


def owners_of(sizes: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Which rank steps each tensor: whole ones, since Muon needs whole matrices; the largest first, each to who has least."""
    loads, owners = [0] * num_ranks, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        owners[place] = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        loads[owners[place]] += sizes[place]
    return tuple(owners)


def owned(gradient: Gradient, owners: Sequence[int], rank: int) -> Gradient:
    return [part for part, owner in zip(gradient, owners, strict=True) if owner == rank]
