"""Settings of the gradient clamp. Importing it loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from everlong.contracts.config import Config

SHARE = 4e-7
"""What Step 5 lets through: spikes are rarer than anything that teaches."""


class NoClamp(Config):
    type: Literal["none"] = "none"


class HiddenClamp(Config):
    """In the backward pass, the gradient that each layer gets for its hidden states: a spike is cut before the layers below amplify
    it. The bound of a layer comes from its histogram of the step before."""

    type: Literal["hidden"] = "hidden"
    of: Literal["vectors", "elements"] = "vectors"
    """vectors: a token's gradient is scaled down to the bound as a whole; elements: every number of it is cut on its own."""
    share: float = Field(SHARE, gt=0, lt=1)
    """Of a layer's vectors, or elements, that lay beyond its bound in the step before. Fewer than 1 of them: no bound."""


class WeightClamp(Config):
    """After the backward pass, the elements of each layer's gradient. It stops no spike from growing on its way down."""

    type: Literal["weights"] = "weights"
    share: float = Field(SHARE, gt=0, lt=1)
    """Of a layer's elements that are cut to the highest of the others. Fewer than 1 of them: none is."""


AnyClamp = NoClamp | HiddenClamp | WeightClamp
ClampConfig = Annotated[AnyClamp, Field(discriminator="type")]
WITHOUT_CLAMP = NoClamp()
