"""The llama with experts for sampling: weights laid out for products of few rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from everlong.models.decisions import Decide
from everlong.models.llama.packed import PackedLlama, Product, product_of
from everlong.models.moe.checkpoint_names import MATRICES
from everlong.models.moe.config import MoeConfig
from everlong.models.moe.routing import mix, route
from everlong.models.numerics import Numerics

# T tokens, M model width, R rows of one expert


class PackedMoe(PackedLlama):
    """Computes what `MoeLlama` computes, without gradients."""

    def _packed_mlp(self, weights: list[Tensor]) -> tuple[Product, ...]:
        """The router, then expert by expert gate and up as one product, and down."""
        products = [product_of(weights[0])]
        for first in range(1, len(weights), len(MATRICES)):
            gate, up, down = weights[first : first + len(MATRICES)]
            products += [product_of(torch.cat([gate, up])), product_of(down)]
        return tuple(products)

    def _adapted_mlp(self, number: int, products: tuple[Product, ...]) -> tuple[Product, ...]:
        return products  # experts have no adapters

    def _mlp(self, number: int, x: Tensor, products: tuple[Product, ...], decide: Decide) -> Tensor:
        assert isinstance(self._config, MoeConfig)
        logits_TE = products[0](x).float()
        chosen_TK, weights_TK = route(logits_TE, self._config, number, decide, Numerics.FAST)

        def expert(number: int, rows_RM: Tensor) -> Tensor:
            gate_up, down = products[1 + 2 * number : 3 + 2 * number]
            gate, up = gate_up(rows_RM).chunk(2, -1)
            return down(F.silu(gate) * up)

        return mix(x, chosen_TK, weights_TK, expert)
