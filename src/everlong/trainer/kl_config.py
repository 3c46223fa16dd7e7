"""Settings of the pull towards a reference policy. Importing it loads no torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from everlong.contracts.config import Config

Support = Literal["kept", "full"]


class NoKl(Config):
    type: Literal["none"] = "none"


class KlLoss(Config):
    """Adds coefficient * estimate to each sampled token's loss, and differentiates it."""

    type: Literal["loss"] = "loss"
    estimator: Literal["k2", "k3", "unbiased"] = "unbiased"
    """With d = log(p/reference). k2 = d**2 / 2: its expected gradient is that of KL(p || reference). k3 = exp(-d) + d - 1:
    that of KL(reference || p). unbiased = p/q * k3 (arXiv:2512.02556): that of KL(p || reference), on stale tokens too."""
    coefficient: float = Field(1e-3, gt=0)
    """Nats of loss per nat."""
    support: Support = "kept"
    """Where both distributions live. kept: what the sampler's recorded truncation left. full: the whole vocabulary."""

    @model_validator(mode="before")
    @classmethod
    def _k1_is_a_reward(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("estimator") == "k1":
            raise ValueError(
                "kl.estimator=k1 with kl.type=loss has no effect: the expected gradient of log(p/reference) is 0. Set kl.type "
                "to reward, or the estimator to k2, k3 or unbiased"
            )
        return settings


class KlReward(Config):
    """Takes coefficient * estimate from each sampled token's reward: its credit falls by the sum over its branch from there on."""

    type: Literal["reward"] = "reward"
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """With d = log(p0/reference). k1 = d: the expected gradient is that of the branch's KL(p || reference). k2 = d**2 / 2 and
    k3 = exp(-d) + d - 1 measure that KL with less noise, but as rewards their gradient is another; k3's nearly vanishes
    where the policies agree."""
    coefficient: float = Field(1e-3, gt=0)
    """Reward per nat."""
    support: Support = "kept"
    """Where both distributions live. kept: what the sampler's recorded truncation left. full: the whole vocabulary."""

    @model_validator(mode="before")
    @classmethod
    def _unbiased_is_a_loss(cls, settings: Any) -> Any:
        if isinstance(settings, dict) and settings.get("estimator") == "unbiased":
            raise ValueError(
                "kl.estimator=unbiased is defined by its gradient, which a reward does not have: set kl.type to loss, or the "
                "estimator to k1"
            )
        return settings


WITHOUT_KL = NoKl()
AnyKl = NoKl | KlLoss | KlReward
KlConfig = Annotated[AnyKl, Field(discriminator="type")]
