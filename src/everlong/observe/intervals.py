"""How sure a measured share is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Z_95 = 1.959963984540054


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """The 95 % score interval of a share (Wilson 1927), within [0, 1]; all of it where nothing was tried.

    It supposes independent trials: several attempts at the same task are more alike than that.
    """
    if not trials:
        return 0.0, 1.0
    share, z2 = successes / trials, Z_95**2 / trials
    middle = share + z2 / 2
    reach = Z_95 * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials))
    return max(0.0, (middle - reach) / (1 + z2)), min(1.0, (middle + reach) / (1 + z2))


def success_text(share: float, trials: float) -> str:
    """A share in percent with its interval. Example: success_text(0.5, 150) is "50 % (42 to 58)"."""
    low, high = wilson_interval(share * trials, trials)
    return f"{100 * share:.0f} % ({100 * low:.0f} to {100 * high:.0f})"


class Gain(NamedTuple):
    """By how much the mean over tasks rose; as shares, with the 95 % interval."""

    mean: float
    low: float
    high: float
    num_tasks: int

    @property
    def text(self) -> str:
        """Example: "+34 points (+25 to +43)"."""
        return f"{100 * self.mean:+.0f} points ({100 * self.low:+.0f} to {100 * self.high:+.0f})"


def paired_gain(
    before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]], draws: int = 10_000, seed: int = 0
) -> Gain | None:
    """Paired bootstrap over tasks (Efron 1979): the same tasks before and after, a task's attempts averaged, percentiles of
    the mean difference. Tasks without an outcome on one side are left out; None where no task has both."""
    tasks = sorted(task for task in before.keys() & after.keys() if before[task] and after[task])
    if not tasks:
        return None
    differences = np.array([np.mean(after[task]) - np.mean(before[task]) for task in tasks])
    drawn = np.random.default_rng(seed).integers(0, len(tasks), (draws, len(tasks)))
    low, high = np.percentile(differences[drawn].mean(1), [2.5, 97.5])
    return Gain(float(differences.mean()), float(low), float(high), len(tasks))
