"""Packed trees laid out so that all a token sees is a few runs of neighbours.

Every path goes on with its heaviest child until it ends: a chain. A chain's tokens stand side by side, behind them what
branches off, the latest fork first. So a token sees the part of its own chain that stands before it, and of at most
log2(T) chains above that one (the light edges of a heavy-path decomposition, Sleator and Tarjan 1983) what stands before the
fork; and all that branches off at one fork stands together and sees the same keys. Attention over a tree is then a list of
products of runs: no mask, no gathered copy, nothing of T times T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# T tokens of all trees; a place is an index into them as they are laid out

Run = tuple[int, int]
"""Neighbouring places, from the first to before the second."""


@dataclass(frozen=True, slots=True)
class Chain:
    start: int
    stop: int
    above: tuple[Run, ...]
    """What its tokens see of other chains, from the root on."""


@dataclass(frozen=True, slots=True)
class Call:
    """Every query sees every key; where both are one run, a query sees the keys up to its own."""

    queries: Run
    keys: Run

    @property
    def is_causal(self) -> bool:
        return self.queries == self.keys


@dataclass(frozen=True, slots=True)
class TreeLayout:
    order: np.ndarray
    """int64[T]: the token that stands at each place."""
    chains: tuple[Chain, ...]
    calls: tuple[Call, ...]
    """One causal for each chain, then one for each fork."""

    def __len__(self) -> int:
        return len(self.order)

    @property
    def place(self) -> np.ndarray:
        """int64[T]: where each token stands."""
        places = np.empty_like(self.order)
        places[self.order] = np.arange(len(self.order))
        return places

    @property
    def is_identity(self) -> bool:
        return bool((self.order == np.arange(len(self.order))).all())


def lay_out(segments: Sequence[tuple[int, int, int]]) -> TreeLayout:
    """Of segments (parent index or -1, start, length) that tile the tokens, parents first."""
    children: list[list[int]] = [[] for _ in segments]
    sizes = [length for _, _, length in segments]
    for index, (parent, _, _) in enumerate(segments):
        if parent >= 0:
            children[parent].append(index)
    for index in range(len(segments) - 1, -1, -1):
        if segments[index][0] >= 0:
            sizes[segments[index][0]] += sizes[index]
    builder = _Builder(segments, children, sizes)
    for index, (parent, _, _) in enumerate(segments):
        if parent < 0:
            builder.add(index)
    return builder.layout()


class _Builder:
    def __init__(
        self, segments: Sequence[tuple[int, int, int]], children: Sequence[Sequence[int]], sizes: Sequence[int]
    ) -> None:
        self._segments, self._children, self._sizes = segments, children, sizes
        self._at = 0
        self._parts: list[np.ndarray] = []
        self._chains: list[Chain] = []
        self._forks: list[Call] = []

    def add(self, root: int) -> None:
        """The whole tree below it."""
        waiting: list[tuple[int, tuple[Run, ...]]] = [(root, ())]
        while waiting:
            first, above = waiting.pop()
            waiting += self._add_chain(first, above)

    def _add_chain(self, first: int, above: tuple[Run, ...]) -> list[tuple[int, tuple[Run, ...]]]:
        """Lay out one chain; returns what branches off from it, that of the latest fork last."""
        chain_start, forks = self._at, []
        segment: int | None = first
        while segment is not None:
            _, start, length = self._segments[segment]
            self._parts.append(np.arange(start, start + length))
            self._at += length
            heavy = max(self._children[segment], key=self._sizes.__getitem__, default=None)
            light = [child for child in self._children[segment] if child != heavy]
            if light:
                forks.append((self._at, light))
            segment = heavy
        if self._at > chain_start:
            self._chains.append(Chain(chain_start, self._at, above))
        below = self._at
        for fork, light in reversed(forks):  # the latest fork's branches stand first
            size = sum(self._sizes[child] for child in light)
            if size and fork > chain_start:
                self._forks.append(Call((below, below + size), (chain_start, fork)))
            below += size
        waiting = []
        for fork, light in forks:
            seen = (*above, (chain_start, fork)) if fork > chain_start else above
            waiting += [(child, seen) for child in reversed(light)]
        return waiting

    def layout(self) -> TreeLayout:
        nothing = np.zeros(0, np.int64)
        causal = tuple(Call((chain.start, chain.stop), (chain.start, chain.stop)) for chain in self._chains)
        return TreeLayout(np.concatenate([nothing, *self._parts]), tuple(self._chains), causal + tuple(self._forks))
