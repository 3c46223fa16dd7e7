"""Settings of the losses, one class each, chosen by `loss.type`. Importing it loads no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from everlong.contracts.config import Config

Reduction = Literal["token", "sequence", "group", "episode", "constant"]
Level = Literal["token", "sequence", "sequence_token"]
SharedPrefix = Literal["once", "sum_over_leaves"]


class Averaged(Config):
    """What every loss says about its mean."""

    reduction: Reduction = "token"
    """token: mean over the batch's trained tokens. sequence, episode, group: mean within each branch, episode or group, then
    over them. constant: the sum over a branch divided by constant_length, then the mean over branches."""
    constant_length: int | None = Field(None, ge=1)
    """Tokens that a branch counts as, whatever it has; for the constant reduction only."""

    @model_validator(mode="after")
    def _length_belongs_to_constant(self) -> Averaged:
        if (self.reduction == "constant") != (self.constant_length is not None):
            raise ValueError(
                f"loss.reduction=constant and loss.constant_length go together, got reduction={self.reduction} and "
                f"constant_length={self.constant_length}: set both or neither"
            )
        return self


class OwnRatios(Config):
    """Of losses that are defined on each token's own ratio."""

    @model_validator(mode="before")
    @classmethod
    def _no_level(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("level", "token") != "token":
            raise ValueError(
                f"loss {cls.model_fields['type'].default} is defined on each token's own ratio, got "
                f"loss.level={settings['level']}: leave it out, or take grpo, cispo, gspo or gspo_token"
            )
        return settings


class ReinforceConfig(Averaged, OwnRatios):
    """Plain policy gradient; what separates engine from trainer is weighed by ratio.correction alone."""

    type: Literal["reinforce"] = "reinforce"


class GrpoConfig(Averaged):
    """The clipped surrogate (arXiv:2402.03300) with separate bounds (arXiv:2503.14476)."""

    type: Literal["grpo"] = "grpo"
    level: Level = "token"
    """Whose ratio is clipped. token: each token's own. sequence: the geometric mean over the branch's trained tokens.
    sequence_token: that value with the gradient of each token alone, so that credit may differ within a branch."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio counts no further below 1 - clip_low where the credit is negative."""
    clip_high: float = Field(0.28, ge=0)
    """The ratio counts no further above 1 + clip_high where the credit is positive."""
    dual_clip: float | None = Field(3.0, gt=1)
    """The ratio counts no further above this where the credit is negative; None is without bound."""


class PpoConfig(Averaged, OwnRatios):
    """The clipped surrogate (arXiv:1707.06347) on a critic's credit; needs credit.type=gae."""

    type: Literal["ppo"] = "ppo"
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio counts no further below 1 - clip_low where the credit is negative."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio counts no further above 1 + clip_high where the credit is positive."""


class DrGrpoConfig(OwnRatios):
    """The clipped surrogate summed over a branch and divided by a constant (arXiv:2503.20783); needs credit.scale=none."""

    type: Literal["dr_grpo"] = "dr_grpo"
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio counts no further below 1 - clip_low where the credit is negative."""
    clip_high: float = Field(0.2, ge=0)
    """The ratio counts no further above 1 + clip_high where the credit is positive."""
    constant_length: int = Field(4096, ge=1)
    """Tokens that every branch counts as, whatever it has; the paper takes the longest that is allowed."""

    @property
    def reduction(self) -> Reduction:
        return "constant"


class DapoConfig(OwnRatios):
    """The clipped surrogate with a higher upper bound and the token mean (arXiv:2503.14476)."""

    type: Literal["dapo"] = "dapo"
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio counts no further below 1 - clip_low where the credit is negative."""
    clip_high: float = Field(0.28, ge=0)
    """The ratio counts no further above 1 + clip_high where the credit is positive."""

    @property
    def reduction(self) -> Reduction:
        return "token"

    @property
    def constant_length(self) -> None:
        return None


class CispoConfig(Averaged):
    """Policy gradient weighed by the clipped ratio, which no gradient passes (arXiv:2506.13585)."""

    type: Literal["cispo"] = "cispo"
    level: Literal["token", "sequence"] = "token"
    """Whose ratio weighs a token: its own, or the geometric mean over the branch's trained tokens."""
    ratio_min: float = Field(0.0, ge=0, lt=1)
    """Smallest weight, as a ratio; 0 is without bound."""
    ratio_max: float = Field(5.0, gt=1)
    """Largest weight, as a ratio: what others write as 1 + epsilon."""


class SequenceClipped(Config):
    """What the two losses on sequence ratios share; their ratios are far closer to 1 than a token's."""

    clip_low: float = Field(3e-4, ge=0, lt=1)
    """The ratio counts no further below 1 - clip_low where the credit is negative."""
    clip_high: float = Field(4e-4, ge=0)
    """The ratio counts no further above 1 + clip_high where the credit is positive."""
    reduction: Literal["sequence", "episode"] = "sequence"
    """Mean within each branch or episode, then over them; a token mean would multiply a ratio by its length."""

    @property
    def constant_length(self) -> None:
        return None


class GspoConfig(SequenceClipped):
    """The clipped surrogate on the geometric mean of a branch's ratios (arXiv:2507.18071)."""

    type: Literal["gspo"] = "gspo"

    @property
    def level(self) -> Level:
        return "sequence"


class GspoTokenConfig(SequenceClipped):
    """The same ratio with the gradient of each token alone: credit may differ within a branch (arXiv:2507.18071)."""

    type: Literal["gspo_token"] = "gspo_token"

    @property
    def level(self) -> Level:
        return "sequence_token"


class SapoConfig(Averaged, OwnRatios):
    """Soft adaptive policy optimisation (arXiv:2511.20347)."""

    type: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, gt=0)
    """Steepness of the gate where the credit is above 0."""
    tau_negative: float = Field(1.05, gt=0)
    """Steepness elsewhere: a little larger, so that unlikely tokens are pushed away more carefully."""


class KimiConfig(Averaged, OwnRatios):
    """The ratio clipped whatever the sign of the credit, and a pull on its square logarithm (arXiv:2602.02276)."""

    type: Literal["kimi"] = "kimi"
    reduction: Reduction = "group"
    """group: mean over all trained tokens of a group, then over groups, as in the paper; token, sequence, episode, constant
    as for every loss."""
    ratio_min: float = Field(0.5, ge=0, lt=1)
    """Below, only the pull is left."""
    ratio_max: float = Field(2.0, gt=1)
    """Above, only the pull is left."""
    pull: float = Field(1e-3, ge=0)
    """Weight of log(ratio)**2; raise it until the mean square stays near 1e-3."""


AnyLoss = (
    ReinforceConfig
    | GrpoConfig
    | PpoConfig
    | DrGrpoConfig
    | DapoConfig
    | CispoConfig
    | GspoConfig
    | GspoTokenConfig
    | SapoConfig
    | KimiConfig
)
LossConfig = Annotated[AnyLoss, Field(discriminator="type")]


def level_of(loss: AnyLoss) -> Level:
    """Token for the losses that know no other."""
    return loss.level if isinstance(loss, GrpoConfig | CispoConfig | GspoConfig | GspoTokenConfig) else "token"
