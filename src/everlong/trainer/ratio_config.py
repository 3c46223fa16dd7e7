"""Settings of the update ratio and of what is done about the difference between engine and trainer. Loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from everlong.contracts.config import Config


class NoCorrection(Config):
    type: Literal["none"] = "none"


class TokenTruncation(Config):
    """Weights a token by p0/q, cut at a cap (truncated importance sampling, TIS)."""

    type: Literal["token_truncation"] = "token_truncation"
    cap: float | None = Field(2.0, gt=1)
    """Largest weight; None is without bound, as decoupled PPO is written (arXiv:2505.24298)."""


class TokenMask(Config):
    """Weights a token by p0/q and rejects it outside [low, high] (IcePop, arXiv:2510.18855; MIS with low 0)."""

    type: Literal["token_mask"] = "token_mask"
    low: float = Field(0.5, ge=0, lt=1)
    """Tokens below are rejected; 0 rejects none there."""
    high: float = Field(5.0, gt=1)
    """Tokens above are rejected."""


class DoubleSidedMask(Config):
    """Weights a token by the current p/q and rejects it unless low < p/q < high (DIS, arXiv:2607.07508)."""

    type: Literal["double_sided"] = "double_sided"
    low: float = Field(0.2, ge=0, lt=1)
    """Tokens at or below are rejected."""
    high: float = Field(4.0, gt=1)
    """Tokens at or above are rejected."""


class MisPo(Config):
    """Keeps a token with weight 1 or rejects it, by its own p0/q and by its branch's geometric mean (arXiv:2602.10604)."""

    type: Literal["mis_po"] = "mis_po"
    token_low: float | None = Field(0.5, ge=0, lt=1)
    """Tokens below are rejected; None rejects none there."""
    token_high: float | None = Field(2.0, gt=1)
    """Tokens above are rejected; None rejects none there."""
    sequence_low: float | None = Field(0.996, ge=0, lt=1)
    """Branches whose mean is below are rejected whole; None rejects none there."""
    sequence_high: float | None = Field(1.001, gt=1)
    """Branches whose mean is above are rejected whole; None rejects none there. The range starves learning on stale data."""

    @model_validator(mode="after")
    def _rejects_something(self) -> MisPo:
        if {self.token_low, self.token_high, self.sequence_low, self.sequence_high} == {None}:
            raise ValueError("ratio.correction mis_po without any bound has no effect: set one, or take type none")
        return self


class SequenceProduct(Config):
    """Weights a branch by the product of its tokens' p0/q: unbiased, and vanishing or exploding with length."""

    type: Literal["sequence_product"] = "sequence_product"
    low: float = Field(0.0, ge=0, lt=1)
    """Where it acts below; 0 does not."""
    high: float = Field(2.0, gt=1)
    """Where it acts above."""
    outside: Literal["truncate", "mask"] = "truncate"
    """truncate: the weight is cut at the bound. mask: the branch is rejected."""


class SequenceGeometric(Config):
    """Weights a branch by the geometric mean of its tokens' p0/q: biased, and independent of length."""

    type: Literal["sequence_geometric"] = "sequence_geometric"
    low: float = Field(0.999, ge=0, lt=1)
    """Where it acts below; 0 does not."""
    high: float = Field(1.001, gt=1)
    """Where it acts above."""
    outside: Literal["truncate", "mask"] = "mask"
    """truncate: the weight is cut at the bound. mask: the branch is rejected."""


AnyCorrection = (
    NoCorrection | TokenTruncation | TokenMask | DoubleSidedMask | MisPo | SequenceProduct | SequenceGeometric
)
CorrectionConfig = Annotated[AnyCorrection, Field(discriminator="type")]


class RatioConfig(Config):
    """What the update ratio is taken against, and what is done about the difference between engine and trainer."""

    base: Literal["behaviour", "proximal"] = "behaviour"
    """behaviour: the logprobs recorded at sampling, each token's by its own policy version, so staleness and mismatch stand
    in the ratio itself. proximal: the trainer's own logprobs before the first of several updates (arXiv:2505.24298); the
    mismatch is corrected apart."""
    correction: CorrectionConfig = NoCorrection()
    """Of the mismatch p0/q: for the proximal base, or for loss reinforce, which has no ratio."""
    off_policy_drop: float | None = Field(None, ge=0)
    """A branch with negative credit is dropped where its mean log(q/p) exceeds this many nats (off-policy sequence masking,
    arXiv:2512.02556); None drops none. It weighs nothing, so it goes with every base and correction."""

    score_centring: bool = False
    """Takes from each token's weighted score what the sampler expects of it, so that mismatch moves the policy nowhere where the
    credit is 0 in the mean (arXiv:2609.20807). For loss reinforce, and sampling whose kept sets bound what can be sampled."""

    @property
    def of_sequences(self) -> bool:
        """Whether a branch's tokens must be seen together."""
        return self.off_policy_drop is not None or self.correction.type in (
            "mis_po",
            "sequence_product",
            "sequence_geometric",
        )
