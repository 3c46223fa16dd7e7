"""What a token weighs and what the sum is divided by: fixed for the whole batch before the first micro-batch is run.

Terms are summed with `token_weights` over all micro-batches, and the sum is divided by `denominator` once, when the batch
closes: the cut into micro-batches, workers or branches cannot show.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from everlong.contracts.records import EpisodeShare
from everlong.trainer.config import Reduction


def token_weights(episode_T: np.ndarray, episodes: Sequence[EpisodeShare], reduction: Reduction) -> np.ndarray:
    """float32[T] from the index of each token's episode: 1 for the token mean, 1 / (its episode's tokens) for the sequence mean.

    An episode counts whole, however many branches and micro-batches its tokens lie in.
    """
    if reduction == "token":
        return np.ones(len(episode_T), np.float32)
    counts = np.array([share.num_trainable for share in episodes], np.float32)
    return 1 / counts[episode_T]


def denominator(episodes: Sequence[EpisodeShare], reduction: Reduction) -> int:
    """Trained tokens of the batch, or its episodes with at least one."""
    counts = [share.num_trainable for share in episodes]
    return sum(counts) if reduction == "token" else sum(count > 0 for count in counts)
