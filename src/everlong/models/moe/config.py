"""Shape of a llama with experts, to and from Hugging Face's config.json. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any, Literal

from everlong.contracts.decisions import ABSENT, DecisionShape
from everlong.models.llama.config import LlamaConfig

Router = Literal["softmax", "sigmoid"]

EXPERTS = "experts"
"""The numbers of the experts that a token was sent to, highest score first."""
EXPERT_WEIGHTS = "expert_weights"
"""With what weight each entered the sum."""

PROJECTIONS_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""They stand once per expert, so that there is no such projection of a layer."""
MIXTRAL, OWN = "mixtral", "everlong_moe"
"""Value of `model_type`: ours where no other program has the same network, so that none loads it as something else."""


@dataclass(frozen=True, slots=True)
class MoeConfig(LlamaConfig):
    """`intermediate_size` is that of one expert."""

    num_experts: int = 8
    experts_per_token: int = 2
    router: Router = "softmax"
    """What makes scores of the router's logits: a distribution over the experts, or a number between 0 and 1 for each."""
    normalised: bool = True
    """Whether the scores of the chosen are divided by their sum."""

    def __post_init__(self) -> None:
        LlamaConfig.__post_init__(self)
        if not 1 <= self.experts_per_token <= self.num_experts < ABSENT["uint16"]:
            raise ValueError(
                f"a token goes to {self.experts_per_token} of {self.num_experts} experts: expected at least 1, at most all, and "
                f"fewer than {ABSENT['uint16']} in all"
            )
        if self.normalised and self.experts_per_token == 1:
            raise ValueError(
                "the one expert of a token has the weight 1 whatever its router says, which would never learn: take two, or "
                "set normalised to false"
            )

    @property
    def decisions(self) -> dict[str, DecisionShape]:
        layers, width = self.num_layers, self.experts_per_token
        return {
            EXPERTS: DecisionShape(layers, width, self.num_experts),
            EXPERT_WEIGHTS: DecisionShape(layers, width, None),
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any], *, vocab_size: int | None = None) -> MoeConfig:
        """Raises ValueError for what this family does not honour."""
        if config.get("model_type") not in (MIXTRAL, OWN):
            raise ValueError(
                f"expected a checkpoint of {MIXTRAL} or {OWN}, config.json says model_type {config.get('model_type')!r}"
            )
        if config.get("sliding_window"):
            raise ValueError(f"config.json sets sliding_window={config['sliding_window']!r}, which is not supported")
        dense = LlamaConfig.from_hf({**config, "model_type": "llama"}, vocab_size=vocab_size)
        return cls(
            **{field.name: getattr(dense, field.name) for field in fields(LlamaConfig)},
            num_experts=config["num_local_experts"],
            experts_per_token=config["num_experts_per_tok"],
            router=config.get("router", "softmax"),
            normalised=config.get("normalised", True),
        )

    def to_hf(self) -> dict[str, Any]:
        theirs = self.router == "softmax" and self.normalised
        return {
            **LlamaConfig.to_hf(self),
            "architectures": ["MixtralForCausalLM" if theirs else "EverlongMoeForCausalLM"],
            "model_type": MIXTRAL if theirs else OWN,
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "router": self.router,
            "normalised": self.normalised,
            "sliding_window": None,
        }


def check_targets(targets: Collection[str], shape: LlamaConfig) -> None:
    """Raises ValueError for adapters of projections that a layer with experts does not have."""
    missing = [name for name in targets if name in PROJECTIONS_OF_EXPERTS] if isinstance(shape, MoeConfig) else []
    if missing:
        raise ValueError(
            f"adapter.targets name {', '.join(missing)}, and in a model with experts these stand once per expert, where no "
            'adapter is: set adapter.targets to ["q_proj", "k_proj", "v_proj", "o_proj"] or some of them'
        )
