"""What a single turn costs: taken from the credit of that turn's tokens, A_t <- A_t - p, after everything else is known.

Put into the rewards instead, a penalty would reach earlier turns through their returns, and the baseline or a critic would
learn to expect it; so it is in neither.
"""

from __future__ import annotations

from pydantic import Field

from everlong.contracts.config import Config
from everlong.trajectories.credit.overlong import NoPunishment, OverlongConfig


class Punished(Config):
    """What every estimator lets an episode or a turn lose."""

    overlong: OverlongConfig = NoPunishment()
    """What comes near a length limit loses some of its reward, or not. The record keeps the verdict's own."""
    malformed_call: float = Field(0.0, ge=0)
    """Taken from the credit of every token of a turn whose tool call could not be read, and of no other turn. A call that was
    merely cut off at its limit costs nothing here."""
