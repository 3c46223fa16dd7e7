"""Settings of the critic. Importing it loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from everlong.contracts.config import Config
from everlong.trainer.optimizer_config import AdamWConfig, AnyOptimizer


class LinearHead(Config):
    type: Literal["linear"] = "linear"
    initial: float = 0.0
    """What it says of every state before it has learnt anything: the mean reward, where that is known."""


class BoundedHead(Config):
    """A sigmoid between two bounds, so that no value is one that a return cannot have; it starts half-way."""

    type: Literal["bounded"] = "bounded"
    low: float = 0.0
    """No return lies below; a batch with one is refused."""
    high: float = 1.0
    """No return lies above; a batch with one is refused."""

    @model_validator(mode="after")
    def _is_a_range(self) -> BoundedHead:
        if not self.low < self.high:
            raise ValueError(
                f"critic.head bounds leave no room: got low={self.low} and high={self.high}; lower one or raise the other"
            )
        return self


AnyHead = LinearHead | BoundedHead
HeadConfig = Annotated[AnyHead, Field(discriminator="type")]


class CriticConfig(Config):
    """A network of its own, with the policy's shape, that says of every state which return follows; for credit.type=gae.

    It begins as a copy of the policy before the first batch that a policy sampled, and is stepped by AdamW with the policy's
    optimiser settings, except for those that stand here.
    """

    head: HeadConfig = LinearHead()
    """What makes a value of the last hidden state."""
    learning_rate: float = Field(5e-4, gt=0)
    """After the warm-up. Published critics learn 1.5 to 5 times as fast as their policies."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of the critic over which its learning rate grows linearly from the first."""
    updates_per_batch: int = Field(2, ge=1)
    """Optimiser steps of the critic over each batch; the policy's are trainer.updates_per_batch."""
    pretrain_batches: int = Field(0, ge=0)
    """First batches that only the critic learns from, while the policy stays as it is; papers take 50 (arXiv:2504.05118)."""


def critic_optimizer(critic: CriticConfig, policy: AnyOptimizer) -> AdamWConfig:
    shared = {name: getattr(policy, name) for name in ("weight_decay", "beta1", "beta2", "eps", "max_grad_norm")}
    return AdamWConfig(learning_rate=critic.learning_rate, warmup_steps=critic.warmup_steps, **shared)
