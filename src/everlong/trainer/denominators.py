"""What a token weighs and what the sum is divided by: fixed for the whole batch before the first micro-batch is run.

Terms are summed with their weights over all micro-batches, and the sum is divided by the denominator once, when the batch
closes: the cut into micro-batches, workers or branches cannot show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from everlong.contracts.records import EpisodeShare
from everlong.trainer.loss_config import Reduction


@dataclass(frozen=True, slots=True)
class TokenOwners:
    """Who owns each of T trained tokens of a batch, over all its micro-batches."""

    episode_T: np.ndarray
    """int64, index into the batch's episodes."""
    branch_T: np.ndarray
    """int64, number of the branch within its episode."""


def weigh(
    owners: TokenOwners, episodes: Sequence[EpisodeShare], reduction: Reduction, constant_length: int | None = None
) -> tuple[np.ndarray, int]:
    """float32[T] and the denominator.

    token: 1 each, over all tokens. sequence, episode, group: 1 / (trained tokens of the token's branch, episode, group), over
    those with at least one. constant: 1 each, over branches * constant_length. A branch, episode or group counts whole,
    however many micro-batches its tokens lie in. Supervised traces are one group.
    """
    num_tokens = len(owners.episode_T)
    if reduction == "token" or not num_tokens:
        return np.ones(num_tokens, np.float32), num_tokens
    counts_T, num_units = _units(owners, episodes, "sequence" if reduction == "constant" else reduction)
    if reduction == "constant":
        assert constant_length is not None
        return np.ones(num_tokens, np.float32), num_units * constant_length
    return (1 / counts_T).astype(np.float32), num_units


def _units(owners: TokenOwners, episodes: Sequence[EpisodeShare], reduction: Reduction) -> tuple[np.ndarray, int]:
    """How many trained tokens each token's unit has, [T], and how many units there are."""
    if reduction == "sequence":
        keys = np.stack([owners.episode_T, owners.branch_T], 1)
    elif reduction == "episode":
        keys = owners.episode_T[:, None]
    else:
        keys = np.array([share.group for share in episodes], np.int64)[owners.episode_T][:, None]
    _, units_T, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    return counts[units_T.reshape(-1)], len(counts)
