"""Which values of a tensor are coded together: those whose old exponents lie in one interval.

An optimiser moves small weights as far as large ones, and their floats stand closer together, so the share that changes
doubles from one exponent to the next smaller one, and so does the distance in units in the last place. Coded in groups of like
exponents, positions and distances come near their entropy conditional on the old exponent. Both sides know the old
exponents, so only the bounds are sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

# E bins of exponents, ascending; edges a < b cut out the bins from a on and below b

EXPONENTS = 256
"""Of either dtype."""

MAX_BINS = 18
"""The largest exponents have a bin each, all others share the lowest."""

GROUP_BITS = 180
"""What a group costs beyond what it holds: its header, bytes that are not full, a table of symbols."""

LOOK_SHARE = 0.015
"""Of all bits: what it is worth to compare each value with one bound less when a delta is applied. More gives faster and larger
deltas."""

FIND_BITS = 0.3
"""The same for finding a changed value among its group's."""

RICE_BITS = 0.05
"""What a position costs over its entropy."""

SIZES = 8
"""Distances of so many ulp and more are counted as one."""


class Coding(StrEnum):
    AMONG_ALL = "among_all"
    """Positions among all values, which costs little and is faster where nearly all are of the group; the outermost's only."""
    AMONG_OWN = "among_own"
    """Positions among the group's own values."""
    EVERY = "every"
    """No positions: a step for every value, 0 where nothing changed."""


@dataclass(frozen=True, slots=True)
class Group:
    """Values with an exponent from `bound` on that are in no group before it."""

    bound: int
    coding: Coding


WHOLE = (Group(0, Coding.AMONG_ALL),)


def choose_groups(num_values_X: np.ndarray, sizes_XS: np.ndarray) -> tuple[Group, ...]:
    """The cheapest partition, largest exponents first; the last one's bound is 0.

    `num_values_X`: how many values have each exponent (an estimate will do). `sizes_XS`: how many of them changed by 1, 2, …,
    `SIZES` or more ulp.
    """
    counts_X = np.maximum(num_values_X, sizes_XS.sum(1)).astype(np.float64)
    present = np.flatnonzero(counts_X)
    if not present.size:
        return WHOLE
    lowest = max(int(present[0]), int(present[-1]) - MAX_BINS + 1)
    edges = np.array([0, *range(lowest + 1, int(present[-1]) + 2)])
    values_E = np.add.reduceat(counts_X, edges[:-1])
    sizes_ES = np.add.reduceat(sizes_XS.astype(np.float64), edges[:-1])
    bits, codings = _costs(values_E, sizes_ES)
    best, before = np.zeros(len(edges)), np.zeros(len(edges), np.int64)
    for upper in range(1, len(edges)):
        sums = best[:upper] + bits[:upper, upper]
        before[upper] = int(np.argmin(sums))
        best[upper] = sums[before[upper]]
    groups, upper = [], len(edges) - 1
    while upper:
        lower = int(before[upper])
        groups.append(Group(int(edges[lower]), list(Coding)[codings[lower, upper]]))
        upper = lower
    return tuple(groups)


def _costs(values_E: np.ndarray, sizes_ES: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[lower edge, upper edge]: bits of that group under its best coding, and which coding that is."""
    below, sizes = _sums_below(values_E), _sums_below(sizes_ES)
    own = np.maximum(below[None, :] - below[:, None], 0)
    sizes_ab = np.maximum(sizes[None, :] - sizes[:, None], 0)
    changed = sizes_ab.sum(2)
    far = sizes_ab[:, :, 1:]
    steps = changed + _positions(changed, far.sum(2)) + _symbols(far)
    among_all = np.full_like(own, np.inf)
    among_all[:, -1] = _positions(np.full_like(own[:, -1], below[-1]), changed[:, -1]) + steps[:, -1]
    look = LOOK_SHARE * among_all[0, -1] * (np.arange(len(below)) > 0)[:, None]
    among_all += look
    among_own = _positions(own, changed) + steps + look + FIND_BITS * changed
    every = np.where(2 * changed > own, _entropy(own, changed) + changed + _symbols(sizes_ab), np.inf)
    costs = np.stack([among_all, among_own, every])
    return costs.min(0) + GROUP_BITS, costs.argmin(0)


def _sums_below(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts, axis=0)])


def _positions(among: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Bits of the positions of `count` out of `among`: unary from a half on."""
    return np.where(2 * count > among, among, _entropy(among, count) + RICE_BITS * count)


def _entropy(among: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Bits that say which `count` out of `among`."""
    count, rest = np.minimum(count, among), np.maximum(among - count, 0)
    return _times_log(among) - _times_log(count) - _times_log(rest)


def _symbols(counts_S: np.ndarray) -> np.ndarray:
    """Entropy in bits of symbols that occur so often, along the last axis; the last of them stands for several."""
    return _times_log(counts_S.sum(-1)) - _times_log(counts_S).sum(-1) + 3 * counts_S[..., -1]


def _times_log(counts: np.ndarray) -> np.ndarray:
    return counts * np.log2(np.maximum(counts, 1))
