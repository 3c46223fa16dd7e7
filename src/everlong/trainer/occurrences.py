"""On which branches a trained token counts.

A token that several branches of an episode share passes through the network once. `once`: it trains on the branch that first holds
it, with that branch's weight; where a later branch is measured whole (its ratio, the mass of its mismatch) it is a constant there
(QwenGyre, arXiv:2609.33848). `sum_over_leaves`: it trains on every branch that holds it, as if each branch were a row of its own
(Tree Training, arXiv:2511.00413).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from everlong.contracts.records import MicroBatch, Segment
from everlong.trainer.denominators import TokenOwners
from everlong.trainer.replay import Rows

# R trained rows of a micro-batch, F occurrences of them on branches


@dataclass(frozen=True, slots=True)
class Occurrences:
    """In the order of the path within each branch."""

    rows_F: np.ndarray
    """int64, which trained row it is."""
    owners: TokenOwners
    """Of whose branch."""
    trains_F: np.ndarray
    """bool; false for a constant."""

    @property
    def training(self) -> TokenOwners:
        return TokenOwners(self.owners.episode_T[self.trains_F], self.owners.branch_T[self.trains_F])


def each_once(rows: Rows, owners: TokenOwners) -> Occurrences:
    """Every row on the branch that trains it, and nowhere else."""
    return Occurrences(np.arange(len(rows)), owners, np.ones(len(rows), bool))


def on_every_branch(micro_batch: MicroBatch, rows: Rows, owners: TokenOwners, *, trains: bool) -> Occurrences:
    """Every row on each of its episode's branches that holds it. `trains`: on all of them; else on the one that trains it, and the
    others have a sampled one as a constant."""
    found = [each_once(rows, owners)]
    sampled = micro_batch.columns.sampled[rows.tokens]
    for episode, branch, leaf in _leaves(micro_batch, rows, owners):
        shared = _rows_above(micro_batch.segments, leaf, rows, owners, (episode, branch))
        if not trains:
            shared = shared[sampled[shared]]
        owner = TokenOwners(np.full(len(shared), episode), np.full(len(shared), branch))
        found.append(Occurrences(shared, owner, np.full(len(shared), trains)))
    if not any(len(part.rows_F) for part in found[1:]):
        return found[0]
    rows_F = np.concatenate([part.rows_F for part in found])
    episodes_F = np.concatenate([part.owners.episode_T for part in found])
    branches_F = np.concatenate([part.owners.branch_T for part in found])
    positions_F = micro_batch.positions()[rows.tokens[rows_F]]
    order = np.lexsort((positions_F, branches_F, episodes_F))
    trains_F = np.concatenate([part.trains_F for part in found])
    return Occurrences(rows_F[order], TokenOwners(episodes_F[order], branches_F[order]), trains_F[order])


def _leaves(micro_batch: MicroBatch, rows: Rows, owners: TokenOwners) -> list[tuple[int, int, int]]:
    """Episode and number of every branch that trains here, and the last segment that does for it."""
    segment_T = np.zeros(len(micro_batch.columns), np.int64)
    for index, segment in enumerate(micro_batch.segments):
        segment_T[segment.start : segment.start + segment.length] = index
    last: dict[tuple[int, int], int] = {}
    triples = np.stack([owners.episode_T, owners.branch_T, segment_T[rows.tokens]], 1)
    for episode, branch, segment in np.unique(triples, axis=0).tolist():
        last[episode, branch] = segment  # the highest comes last, and parents come before their children
    return [(episode, branch, segment) for (episode, branch), segment in last.items()]


def _rows_above(
    segments: Sequence[Segment], leaf: int, rows: Rows, owners: TokenOwners, branch: tuple[int, int]
) -> np.ndarray:
    """Rows of the same episode on the way from the root to the leaf that another branch trains."""
    found = []
    while leaf >= 0:
        segment = segments[leaf]
        first, last = np.searchsorted(rows.tokens, (segment.start, segment.start + segment.length))
        own = np.arange(first, last)
        shared = (owners.episode_T[own] == branch[0]) & (owners.branch_T[own] != branch[1])
        found.append(own[shared])
        leaf = segment.parent
    return np.concatenate(found[::-1])
