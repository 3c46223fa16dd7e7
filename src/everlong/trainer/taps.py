"""What is watched, or changed, inside the passes that make a gradient."""

from __future__ import annotations

from dataclasses import dataclass

from everlong.models.attention_logits import HighestLogits
from everlong.trainer.gradient_clamp import HiddenGradientClamp


@dataclass(frozen=True, slots=True)
class Taps:
    """None where nobody asked."""

    clamp: HiddenGradientClamp | None = None
    logits: HighestLogits | None = None


NO_TAPS = Taps()
