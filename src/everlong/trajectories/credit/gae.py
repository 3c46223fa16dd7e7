"""Generalised advantage estimation over the tokens that the policy sampled (Schulman et al. 2016, arXiv:1506.02438):

delta_t = r_t + discount V_next(t) - V_t        A_t = delta_t + discount decay A_next(t)

next(t) is the next trained token, not the next token: what tools and users wrote is no step, has no value and no target, and
stands in the critic's context only. The reward falls due at the last token. Credit and value target have a decay each
(VC-PPO, arXiv:2503.01491); the credit's may grow with length, decay = max(0, 1 - 1 / (alpha l)) (VAPO, arXiv:2504.05118).

An episode that was cut off has no reward of its own end: in its place stands the value of the state that it was left in.

Where another branch goes on with the work (a compaction), `bootstrap` walks on into it: the value behind the last token is that
of the branch that follows. `discount` takes every branch for itself, the episode's reward at its end, and multiplies its credit
by (discount decay)^n, n trained tokens in the branches behind it (CompactionRL, arXiv:2607.05378).
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from everlong.contracts.config import Config
from everlong.trajectories.credit.penalties import Punished

# N trained tokens, in the order in which they were sampled


class FixedDecay(Config):
    type: Literal["fixed"] = "fixed"
    value: float = Field(1.0, ge=0, le=1)
    """Lambda: 1 compares the whole return with the value, 0 looks one token ahead."""

    def of(self, num_tokens: int) -> float:
        return self.value


class LengthDecay(Config):
    """Long answers look as far ahead, in shares of their length, as short ones (arXiv:2504.05118)."""

    type: Literal["length"] = "length"
    alpha: float = Field(1.5, gt=0)
    """Of 1 - 1 / (alpha l), for l trained tokens; 0 where that is below 0."""

    def of(self, num_tokens: int) -> float:
        return max(0.0, 1 - 1 / (self.alpha * num_tokens))


DecayConfig = Annotated[FixedDecay | LengthDecay, Field(discriminator="type")]


class GaeConfig(Punished):
    """Credit per token against a critic's values; a group needs no second member."""

    type: Literal["gae"] = "gae"
    discount: float = Field(1.0, gt=0, le=1)
    """Gamma, per trained token."""
    decay: DecayConfig = FixedDecay()
    """Lambda of the credit."""
    value_decay: float = Field(1.0, ge=0, le=1)
    """Lambda of the critic's targets: 1 are whole returns."""
    boundary: Literal["bootstrap", "discount"] = "bootstrap"
    """How credit crosses from one branch to the one that goes on with its work."""
    truncated: Literal["bootstrap", "reward"] = "bootstrap"
    """What an episode that a length limit cut off ends in: the critic's value of its last state, or its reward."""

    @model_validator(mode="after")
    def _punished_as_it_ended(self) -> GaeConfig:
        if self.overlong.type != "none" and self.truncated == "bootstrap":
            raise ValueError(
                f"credit.overlong.type={self.overlong.type} takes from the reward of a long episode, which "
                "credit.truncated=bootstrap replaces by a value where it was cut off: set credit.truncated to reward, or "
                "credit.overlong.type to none"
            )
        return self


def advantages(values_N: np.ndarray, end: float, discount: float, decay: float) -> np.ndarray:
    """float64[N]; `end` falls due at the last token: the reward, or the discounted value of the state behind it."""
    behind = np.append(values_N[1:], 0.0) * discount
    behind[-1] = end
    deltas = behind - values_N
    found, rest = np.empty(len(deltas)), 0.0
    for token in range(len(deltas) - 1, -1, -1):
        rest = deltas[token] + discount * decay * rest
        found[token] = rest
    return found
