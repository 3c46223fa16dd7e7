"""How sure a measured share is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

Z_95 = 1.959963984540054
TRIALS_OF_A_DECIMAL = 20
"""From so many trials on a percentage has a decimal. With fewer, one trial moves it by more than 5 points; with more, whole
numbers would no longer add up: 60.5 and 75.5 lie 15 apart, "60" and "76" do not."""


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


def percent(share: float, trials: float, sign: str = "") -> str:
    """100 times a share of so many trials, without the sign for percent. Example: percent(0.605, 200) is "60.5".

    `sign`: "+" says it also of what is not negative.
    """
    return f"{100 * share:{sign}.{int(trials >= TRIALS_OF_A_DECIMAL)}f}"


def interval_text(low: float, high: float, trials: float, sign: str = "") -> str:
    """Example: interval_text(0.42, 0.58, 150) is "42.0 to 58.0"."""
    return f"{percent(low, trials, sign)} to {percent(high, trials, sign)}"


def success_text(share: float, trials: float) -> str:
    """A share in percent with its interval. Example: success_text(0.5, 150) is "50.0 % (42.1 to 57.9)"."""
    low, high = wilson_interval(share * trials, trials)
    return f"{percent(share, trials)} % ({interval_text(low, high, trials)})"


class Gain(NamedTuple):
    """By how much the mean over tasks rose; as shares, with the 95 % interval."""

    mean: float
    low: float
    high: float
    num_tasks: int
    num_trials: int
    """Outcomes of these tasks, on the side that has fewer."""

    @property
    def mean_text(self) -> str:
        """Example: "+34.5"."""
        return percent(self.mean, self.num_trials, "+")

    @property
    def interval_text(self) -> str:
        """Example: "+25.0 to +43.5"."""
        return interval_text(self.low, self.high, self.num_trials, "+")

    @property
    def text(self) -> str:
        """Example: "+34.5 points (+25.0 to +43.5)"."""
        return f"{self.mean_text} points ({self.interval_text})"


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
    num_trials = min(sum(len(side[task]) for task in tasks) for side in (before, after))
    return Gain(float(differences.mean()), float(low), float(high), len(tasks), num_trials)
