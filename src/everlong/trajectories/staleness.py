"""How old a token is when it trains, judged token by token: one branch may hold tokens of several policy versions.

Age = version of the policy that is trained - version of the policy that sampled the token. Judging a branch by its newest
token would let old ones through; dropping it by its oldest would drop exactly the longest episodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
import numpy as np

from everlong.contracts.records import Episode, Turn
from everlong.contracts.tokens import TokenColumns

OVER_AGE = "over_age"
"""Why tokens that were beyond the bound are discarded."""
OLDEST_SHOWN = 8
"""Ages from here on share one place in the histogram."""


def ages_of(columns: TokenColumns, policy_version: int) -> np.ndarray:
    """int32[N] of the N tokens that a policy sampled and that may train."""
    return policy_version - columns.versions[columns.sampled & columns.trainable]


def mask_over_age(episode: Episode, oldest_version: int | None) -> tuple[Episode, int]:
    """The episode with every token of a version before `oldest_version` (None: none) trained nowhere, and how many those
    are. A token that was not trainable stays so and is not counted."""
    if oldest_version is None:
        return episode, 0
    turns = tuple(_masked(turn, oldest_version) for turn in episode.turns)
    before, after = (sum(turn.sampled.num_trainable for turn in some) for some in (episode.turns, turns))
    return (msgspec.structs.replace(episode, turns=turns), before - after) if after < before else (episode, 0)


def _masked(turn: Turn, oldest_version: int) -> Turn:
    sampled = turn.sampled
    old = sampled.sampled & (sampled.versions < oldest_version)
    if not old.any():
        return turn
    return msgspec.structs.replace(turn, sampled=sampled.replace(trainable=sampled.trainable & ~old))


def staleness_stats(columns: Iterable[TokenColumns], policy_version: int) -> dict[str, float]:
    """Shares of the trained tokens by age, `staleness/share/N`, the last of which holds all that are older too. Empty where
    nothing that a policy sampled trains."""
    counts: Counter[int] = Counter()
    for part in columns:
        ages, numbers = np.unique(np.minimum(ages_of(part, policy_version), OLDEST_SHOWN), return_counts=True)
        counts.update(dict(zip(ages.tolist(), numbers.tolist(), strict=True)))
    total = sum(counts.values())
    return {f"staleness/share/{age}": counts[age] / total for age in range(max(counts, default=-1) + 1)}
