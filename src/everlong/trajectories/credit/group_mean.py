"""The group's mean as baseline:  A_i = f * (r_i - mean(r)) / s

s = 1                       Dr. GRPO (arXiv:2503.20783)
s = std(r) + 1e-6           GRPO (arXiv:2402.03300); `std_sample` divides by G - 1 as torch does, `std_population` by G
f = G / (G - 1), s = 1      RLOO (arXiv:2402.14740): the mean of the others instead of the mean of all
G counts the verdicts, not the attempts and not the turns. Rewards that differ only by rounding count as equal, and then
every A is exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, model_validator

from everlong.trajectories.credit.penalties import Punished

EQUAL_REWARDS = 1e-6
"""Rewards closer than this (relative, and absolute below 1) are one: float32 graders round in the seventh digit."""


class GroupMeanConfig(Punished):
    type: Literal["group_mean"] = "group_mean"
    scale: Literal["none", "std_sample", "std_population"] = "std_sample"
    """What the difference from the mean is divided by: nothing, the unbiased deviation (n - 1), or the biased one (n)."""
    leave_one_out: bool = False
    """Compare each episode with the mean of the others; goes with scale none only."""
    min_verdicts: int = Field(2, ge=2)
    """A group with fewer verdicts is discarded whole. Less than 2 leave nothing to compare, so a group of one never trains;
    set it to the group size to discard every group that lost a member."""
    shuffled: bool = False
    """A control for studies: credits are dealt to the group's episodes at random, so that they say nothing about them.
    What still improves is not learnt from the rewards (arXiv:2506.10947)."""

    @model_validator(mode="after")
    def _leave_one_out_is_unscaled(self) -> GroupMeanConfig:
        if self.leave_one_out and self.scale != "none":
            raise ValueError(
                f"credit.leave_one_out is defined without deviation, got credit.scale={self.scale}: set scale to none, or "
                "leave_one_out to false"
            )
        return self


def mean(rewards: Sequence[float]) -> float:
    """The same to the bit in any order of the rewards."""
    return math.fsum(rewards) / len(rewards)


def all_equal(rewards: Sequence[float]) -> bool:
    """True where the rewards differ by no more than rounding."""
    lowest, highest = min(rewards), max(rewards)
    return highest - lowest <= EQUAL_REWARDS * max(1.0, abs(lowest), abs(highest))


def group_mean(rewards: Sequence[float], config: GroupMeanConfig) -> list[float]:
    """The advantage of each of G >= 2 rewards."""
    if all_equal(rewards):
        return [0.0] * len(rewards)
    baseline = mean(rewards)
    differences = [reward - baseline for reward in rewards]
    factor = len(rewards) / (len(rewards) - 1) if config.leave_one_out else 1.0
    scale = _scale(differences, config)
    return [factor * difference / scale for difference in differences]


def _scale(differences: Sequence[float], config: GroupMeanConfig) -> float:
    if config.scale == "none":
        return 1.0
    freedom = len(differences) - (1 if config.scale == "std_sample" else 0)
    return math.sqrt(math.fsum(d * d for d in differences) / freedom) + 1e-6
