"""Settings of the optimiser. Importing it loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from everlong.contracts.config import Config


class Stepped(Config):
    """What every optimiser has: AdamW (arXiv:1711.05101) on float32 masters, for all weights or for those Muon leaves."""

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
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps over which the learning rate grows linearly from the run's start; a batch makes trainer.updates_per_batch."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """The whole gradient is scaled down to this norm; None leaves it."""


class AdamWConfig(Stepped):
    """AdamW for every weight."""

    type: Literal["adamw"] = "adamw"


class MuonConfig(Stepped):
    """Muon (arXiv:2502.16982) for the matrices inside the layers, AdamW for embeddings, head and norms."""

    type: Literal["muon"] = "muon"
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay of the summed gradient."""
    nesterov: bool = True
    """Look one gradient ahead of the momentum."""
    iterations: int = Field(5, ge=1)
    """Newton-Schulz steps towards the nearest orthogonal matrix."""
    per_head: bool = False
    """Orthogonalise the rows of each head's query, key and value projection apart."""
    qk_clip: float | None = Field(None, gt=0)
    """Highest attention logit that a head may reach; beyond it the step scales its queries and keys down. Kimi K2 takes 100."""


AnyOptimizer = AdamWConfig | MuonConfig
OptimizerConfig = Annotated[AnyOptimizer, Field(discriminator="type")]
