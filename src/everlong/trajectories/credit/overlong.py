"""What a long episode costs, settled before episodes are compared. L counts what it sampled, arguments of tools included.

Soft, added to the reward: 0 while L <= max - buffer; ((max - buffer) - L) / buffer up to max; -1 above. Yu et al. 2025
(arXiv:2503.14476), with 20480 and 4096 tokens.

Budget, in place of the reward: -1 where L > tolerance * baseline (Kimi K3's efforts), whatever the verdict was.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from everlong.contracts.config import Config


class NoPunishment(Config):
    type: Literal["none"] = "none"


class SoftPunishment(Config):
    """Takes up to 1 from the reward of an episode that comes near a length limit."""

    type: Literal["soft"] = "soft"
    max_tokens: int = Field(20480, ge=1)
    """Sampled tokens above which the whole punishment falls due."""
    buffer_tokens: int = Field(4096, ge=1)
    """Over so many tokens below, it grows from 0."""

    @model_validator(mode="after")
    def _fits(self) -> SoftPunishment:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(
                f"credit.overlong.buffer_tokens={self.buffer_tokens} exceeds max_tokens={self.max_tokens}: every episode would be "
                "punished; lower it"
            )
        return self


class Budget(Config):
    """Makes the reward of an episode that samples more than its budget -1."""

    type: Literal["budget"] = "budget"
    baseline_tokens: int = Field(1024, ge=1)
    """What the policy needs at the start for what it solves: the mean of its correct episodes."""
    tolerance: float = Field(1.5, gt=0)
    """Times the baseline is the budget; large values leave effort free, small ones press for short answers."""


OverlongConfig = Annotated[NoPunishment | SoftPunishment | Budget, Field(discriminator="type")]


def punished(reward: float, num_tokens: int, config: NoPunishment | SoftPunishment | Budget) -> float:
    """The reward that is compared, of an episode that sampled so many tokens."""
    if config.type == "none":
        return reward
    if config.type == "budget":
        return -1.0 if num_tokens > config.tolerance * config.baseline_tokens else reward
    if num_tokens > config.max_tokens:
        return reward - 1.0
    free = config.max_tokens - config.buffer_tokens
    return reward + min(0.0, (free - num_tokens) / config.buffer_tokens)
