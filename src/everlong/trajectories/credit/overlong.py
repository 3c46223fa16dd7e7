"""Soft overlong punishment, added to the reward before episodes are compared:

0 while L <= max - buffer;   ((max - buffer) - L) / buffer up to max;   -1 above

L counts what the episode sampled. Yu et al. 2025 (arXiv:2503.14476), with 20480 and 4096 tokens.
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


OverlongConfig = Annotated[NoPunishment | SoftPunishment, Field(discriminator="type")]


def punishment(num_tokens: int, config: NoPunishment | SoftPunishment) -> float:
    """Between -1 and 0."""
    if isinstance(config, NoPunishment):
        return 0.0
    free = config.max_tokens - config.buffer_tokens
    if num_tokens > config.max_tokens:
        return -1.0
    return min(0.0, (free - num_tokens) / config.buffer_tokens)
