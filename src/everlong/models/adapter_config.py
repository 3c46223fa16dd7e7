"""Whether the network trains whole or through adapters beside its frozen weights. Light: importing it loads no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from everlong.contracts.config import Config
from everlong.models.llama.checkpoint_names import PROJECTIONS


class NoAdapter(Config):
    """Every weight trains."""

    type: Literal["none"] = "none"


class LoraConfig(Config):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): W x becomes W x + alpha / rank * B A x, and W is frozen."""

    type: Literal["lora"] = "lora"
    rank: int = Field(16, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(32.0, gt=0)
    """What the adapter adds is scaled by alpha / rank."""
    targets: tuple[str, ...] = Field(tuple(PROJECTIONS), min_length=1)
    """Projections that have an adapter, in every layer."""
    seed: int = Field(0, ge=0)
    """Of A's initial values; B starts at 0, so the first policy is the frozen one."""

    @field_validator("targets")
    @classmethod
    def _exist_once(cls, targets: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in targets if name not in PROJECTIONS]:
            raise ValueError(f"there is no projection {', '.join(unknown)}: a layer has {', '.join(PROJECTIONS)}")
        if len(set(targets)) < len(targets):
            raise ValueError("a projection has one adapter: name each once")
        return targets


AdapterConfig = Annotated[NoAdapter | LoraConfig, Field(discriminator="type")]
