"""Settings of the trainer: which loss, against which base, corrected how, stepped how. Importing it loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from everlong.contracts.config import Config

Reduction = Literal["token", "sequence"]


class SapoConfig(Config):
    """Soft adaptive policy optimisation (arXiv:2511.20347)."""

    type: Literal["sapo"] = "sapo"
    tau_positive: float = Field(1.0, gt=0)
    """Steepness of the gate where the credit is above 0."""
    tau_negative: float = Field(1.05, gt=0)
    """Steepness elsewhere: a little larger, so that unlikely tokens are pushed away more carefully."""
    reduction: Reduction = "token"
    """token: mean over the batch's trained tokens. sequence: mean within an episode, then over episodes, as in the paper."""


class GrpoConfig(Config):
    """The clipped surrogate (arXiv:2402.03300) with separate bounds (arXiv:2503.14476)."""

    type: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio counts no further below 1 - clip_low where the credit is negative."""
    clip_high: float = Field(0.28, ge=0)
    """The ratio counts no further above 1 + clip_high where the credit is positive."""
    dual_clip: float | None = Field(3.0, gt=1)
    """The ratio counts no further above this where the credit is negative; None is without bound."""
    reduction: Reduction = "token"
    """token: mean over the batch's trained tokens. sequence: mean within an episode, then over episodes."""


LossConfig = Annotated[SapoConfig | GrpoConfig, Field(discriminator="type")]


class NoCorrection(Config):
    type: Literal["none"] = "none"


class TokenTruncation(Config):
    """Weights a token by p0/q, the engine mismatch, cut at a cap."""

    type: Literal["token_truncation"] = "token_truncation"
    cap: float = Field(2.0, gt=1)
    """Largest weight."""


class TokenMask(Config):
    """Weights a token by p0/q and rejects it outside [low, high] (IcePop, arXiv:2510.18855)."""

    type: Literal["token_mask"] = "token_mask"
    low: float = Field(0.5, ge=0, lt=1)
    """Tokens below are rejected; 0 rejects none there."""
    high: float = Field(5.0, gt=1)
    """Tokens above are rejected."""


CorrectionConfig = Annotated[NoCorrection | TokenTruncation | TokenMask, Field(discriminator="type")]


class RatioConfig(Config):
    """What the update ratio is taken against, and what is done about the difference between engine and trainer."""

    base: Literal["behaviour", "proximal"] = "behaviour"
    """behaviour: the logprobs recorded at sampling, so staleness and mismatch stand in the ratio itself. proximal: the
    trainer's own logprobs before the first of several updates (arXiv:2505.24298); the mismatch is corrected apart."""
    correction: CorrectionConfig = NoCorrection()
    """Of the mismatch p0/q, for the proximal base only."""

    @model_validator(mode="after")
    def _counted_once(self) -> RatioConfig:
        if self.base == "behaviour" and self.correction.type != "none":
            raise ValueError(
                f"ratio.base=behaviour already holds the mismatch that correction {self.correction.type} weighs: it would "
                "count twice. Set ratio.correction.type to none, or ratio.base to proximal"
            )
        return self


class OptimizerConfig(Config):
    """AdamW (arXiv:1711.05101) on float32 masters."""

    learning_rate: float = Field(1e-4, gt=0)
    """After the warm-up; it stays constant."""
    supervised_learning_rate: float | None = Field(None, gt=0)
    """Of batches in which the policy sampled nothing (oracle traces); None is learning_rate. The moments carry over."""
    weight_decay: float = Field(0.0, ge=0)
    """Of matrices and embeddings; norms are never decayed."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the mean gradient."""
    beta2: float = Field(0.99, ge=0, lt=1)
    """Decay of the mean squared gradient."""
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the mean squared gradient."""
    warmup_batches: int = Field(0, ge=0)
    """Batches over which the learning rate grows linearly from the run's start."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """The whole gradient is scaled down to this norm; None leaves it."""


class TrainerConfig(Config):
    updates_per_batch: int = Field(1, ge=1)
    """Optimiser steps over the same batch."""
    head_chunk_tokens: int = Field(512, ge=1)
    """Rows of logits that exist at a time; fewer need less memory."""
    checkpoint_keep: int = Field(2, ge=1)
    """Newest checkpoints that stay in the store."""


def check_effective(loss: SapoConfig | GrpoConfig, ratio: RatioConfig, updates_per_batch: int) -> None:
    """Raises ValueError for settings under which the chosen loss cannot change the gradient."""
    if ratio.base == "proximal" and updates_per_batch == 1:
        raise ValueError(
            f"loss {loss.type} has no effect with ratio.base=proximal and trainer.updates_per_batch=1: the update ratio is "
            "exactly 1, so every loss has the gradient of plain policy gradient. Set ratio.base to behaviour, or "
            "trainer.updates_per_batch to 2 or more"
        )
