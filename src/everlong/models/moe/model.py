"""A llama whose layers have experts where it has one projection up and down."""

from __future__ import annotations

from torch import Tensor

from everlong.models.adapter_config import LoraConfig
from everlong.models.decisions import Decide
from everlong.models.llama.checkpoint_names import Shapes, weight_shapes
from everlong.models.llama.model import Llama
from everlong.models.moe.checkpoint_names import MATRICES, expert_shapes
from everlong.models.moe.config import MoeConfig, check_targets
from everlong.models.moe.routing import mix, route
from everlong.models.numerics import linear, silu, widened

# T tokens, M model width, R rows of one expert


class MoeLlama(Llama):
    """Its `config` is a `MoeConfig`. Adapters are those of attention."""

    def _shapes(self) -> Shapes:
        return weight_shapes(self.config, expert_shapes)

    def adapt(self, config: LoraConfig, base_name: str | None = None) -> None:
        check_targets(config.targets, self.config)
        super().adapt(config, base_name)

    def _mlp(self, layer: int, x: Tensor, weights: list[Tensor], decide: Decide) -> Tensor:
        router, matrices = weights[0], weights[1:]
        assert isinstance(self.config, MoeConfig)
        logits_TE = widened(linear(x, router, self.numerics))
        chosen_TK, weights_TK = route(logits_TE, self.config, layer, decide, self.numerics)

        def expert(number: int, rows_RM: Tensor) -> Tensor:
            first = number * len(MATRICES)
            gate, up, down = matrices[first : first + len(MATRICES)]
            gated = silu(linear(rows_RM, gate, self.numerics), self.numerics) * linear(rows_RM, up, self.numerics)
            return linear(gated, down, self.numerics)

        return mix(x, chosen_TK, weights_TK, expert)
