"""What the row of a batch says beside what the trainer measured. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from everlong.contracts.records import EngineStatus, Episode, ScoredGroup
from everlong.ledger.views import Decile


def batch_metrics(groups: Mapping[int, Sequence[Episode]]) -> dict[str, float]:
    """Of the episodes of a batch: rewards, ends and sizes; what the sessions counted, summed; signs of cheating."""
    episodes = [episode for members in groups.values() for episode in members]
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    counts: defaultdict[str, float] = defaultdict(float)
    for episode in episodes:
        for flag in episode.verdict.flags:
            counts[f"flag/{flag}"] += 1
        for name, value in episode.metrics.items():
            counts[name] += value
    return {
        "reward": float(np.mean(rewards)) if rewards else float("nan"),
        "success": float(np.mean([reward >= 1.0 for reward in rewards])) if rewards else float("nan"),
        "episodes": float(len(episodes)),
        "without_verdict": float(len(episodes) - len(rewards)),
        "group_size": len(rewards) / max(1, len(groups)),
        "turns_per_episode": float(np.mean([len(e.turns) for e in episodes])) if episodes else 0.0,
        "sampled_tokens": float(sum(e.num_sampled for e in episodes)),
        **ends(episodes),
        **counts,
    }


def ends(episodes: Sequence[Episode]) -> dict[str, float]:
    """How many ended by which reason, as `reason/NAME`."""
    reasons = Counter(str(episode.reason) for episode in episodes)
    return {f"reason/{reason}": float(count) for reason, count in reasons.items()}


def signal_metrics(scored: Sequence[ScoredGroup]) -> dict[str, float]:
    """Groups of the batch; those that have nothing to teach, and those of them that have too few verdicts to compare."""
    return {
        "groups": float(len(scored)),
        "groups_without_signal": float(sum(group.discarded is not None for group in scored)),
        "groups_without_verdicts": float(sum(group.discarded == "too_few_verdicts" for group in scored)),
    }


def engine_metrics(status: EngineStatus) -> dict[str, float]:
    """What the engine says of itself when sampling has ended, as `engine/NAME`; sums are since the engine was opened."""
    told = {"running": status.num_running, "waiting": status.num_waiting, **status.metrics}
    return {f"engine/{name}": float(value) for name, value in told.items()}


def loss_metrics(deciles: Sequence[Decile]) -> dict[str, float]:
    """Share of lost episodes in each tenth of those that ended so far, from the shortest to the longest; and, where any was, the
    share of tokens that were too old to train."""
    numbered = [(f"{place:02d}", decile) for place, decile in enumerate(deciles, start=1)]
    values = {f"lost_by_length/{place}": decile.loss_rate for place, decile in numbered}
    if any(decile.over_age for decile in deciles):
        values |= {f"over_age_by_length/{place}": decile.over_age_rate for place, decile in numbered}
    return values
