"""What of a run's settings a model's family decides: checked with the settings where code builds the model, else when it is opened."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everlong.engines.config import VllmConfig, engines_of
from everlong.models.adapter_config import LoraConfig
from everlong.models.llama.config import LlamaConfig
from everlong.models.moe.config import check_targets
from everlong.trainer.config import check_routers

if TYPE_CHECKING:
    from everlong.cli.config import RunConfig


def refuse_misfit(config: RunConfig, shape: LlamaConfig) -> None:
    """Raises ValueError for settings that a model of this shape cannot follow."""
    name = f"model.type={config.model.type}"
    check_routers(config.replay, shape.decisions, name)
    if isinstance(config.adapter, LoraConfig):
        check_targets(config.adapter.targets, shape)
    if shape.decisions and any(isinstance(engine, VllmConfig) for engine in engines_of(config.engine)):
        raise ValueError(
            f"{name} has experts, whose weights an engine of type vllm does not take out of a run's store: take engines of type "
            "embedded only, or a model without experts"
        )
