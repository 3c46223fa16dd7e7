"""The llama for sampling: weights laid out for products of few rows, and few operations per layer.

A decoding step multiplies a handful of rows by every weight, so the time goes into reading weights and into starting
operations. Weights that meet the same rows are one product, and oneDNN keeps each in the order in which it reads it; that
copy costs as much memory as the model. Numbers are rounded where `Llama` rounds them, so the two differ by the order of the
sums alone. For fast numerics: aligned ones need `Llama`'s own products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from everlong.models.decisions import Decide, as_chosen
from everlong.models.llama.checkpoint_names import projection_name, weight_shapes
from everlong.models.llama.model import Attend, Llama

# T tokens, M model width, H query heads, G key-value heads, D head width, V padded vocabulary

Product = Callable[[Tensor], Tensor]
"""Rows in the weights' dtype times one weight transposed."""

PACKED_ROWS = 16
"""Rows that oneDNN lays a weight out for. On the CPUs tried the layout is the same for 16 and for 512."""


@dataclass(frozen=True, slots=True)
class _Layer:
    norm_in: Tensor
    qkv: Product
    out: Product
    norm_mlp: Tensor
    mlp: tuple[Product, ...]
    """Of a llama gate and up as one product, then down."""


class PackedLlama:
    """Computes what `Llama` computes, without gradients. `pack` must be called whenever the model's weights have changed."""

    def __init__(self, model: Llama) -> None:
        self._model, self._config, self.dtype = model, model.config, model.dtype
        cos, sin = model.rotation
        self._cos, self._sin = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        self._frozen: list[_Layer] = []
        self._layers: list[_Layer] = []

    @torch.no_grad()
    def pack(self) -> None:
        weights = iter(self._model.named_weights().values())
        self._embedding = next(weights)
        count = self._model.num_layer_weights
        self._frozen = [self._layer([next(weights) for _ in range(count)]) for _ in range(self._config.num_layers)]
        self._norm_out = next(weights).float()
        self._head = product_of(self._model.head_weight)
        self.pack_adapters()

    @torch.no_grad()
    def pack_adapters(self) -> None:
        """All there is to do where nothing but the adapters has changed since `pack`."""
        self._layers = [self._adapted(number, layer) for number, layer in enumerate(self._frozen)]

    def __call__(self, ids_T: Tensor, positions_T: Tensor, attend: Attend, decide: Decide = as_chosen) -> Tensor:
        """Hidden state [T, M] in float32 after the final norm."""
        hidden = F.embedding(ids_T, self._embedding).float()
        cos, sin = self._cos[positions_T][:, None], self._sin[positions_T][:, None]
        for number, layer in enumerate(self._layers):
            q, k, v = self._heads(layer.qkv(self._norm(hidden, layer.norm_in)), cos, sin)
            hidden = hidden + layer.out(attend(number, q, k, v).flatten(1))
            hidden = hidden + self._mlp(number, self._norm(hidden, layer.norm_mlp), layer.mlp, decide)
        return F.rms_norm(hidden, hidden.shape[-1:], self._norm_out, self._config.rms_norm_eps)

    def logits(self, hidden_TM: Tensor) -> Tensor:
        """float32 [T, V]; the caller hides the rows of the vocabulary that no token has."""
        return self._head(hidden_TM.to(self.dtype)).float()

    def _layer(self, weights: list[Tensor]) -> _Layer:
        norm_in, q_proj, k_proj, v_proj, o_proj, norm_mlp, *mlp = weights
        return _Layer(
            norm_in=norm_in.float(),
            qkv=product_of(torch.cat([q_proj, k_proj, v_proj])),
            out=product_of(o_proj),
            norm_mlp=norm_mlp.float(),
            mlp=self._packed_mlp(mlp),
        )

    def _packed_mlp(self, weights: list[Tensor]) -> tuple[Product, ...]:
        gate_proj, up_proj, down_proj = weights
        return product_of(torch.cat([gate_proj, up_proj])), product_of(down_proj)

    def _adapted_mlp(self, number: int, products: tuple[Product, ...]) -> tuple[Product, ...]:
        gate_up, down = products
        gate_up = self._with_adapters(number, gate_up, "gate_proj", "up_proj")
        return gate_up, self._with_adapters(number, down, "down_proj")

    def _mlp(self, number: int, x: Tensor, products: tuple[Product, ...], decide: Decide) -> Tensor:
        gate_up, down = products
        gate, up = gate_up(x).chunk(2, -1)
        return down(F.silu(gate) * up)

    def _adapted(self, number: int, layer: _Layer) -> _Layer:
        return replace(
            layer,
            qkv=self._with_adapters(number, layer.qkv, "q_proj", "k_proj", "v_proj"),
            out=self._with_adapters(number, layer.out, "o_proj"),
            mlp=self._adapted_mlp(number, layer.mlp),
        )

    def _with_adapters(self, number: int, product: Product, *projections: str) -> Product:
        """The product plus what the adapters of its projections add, as two products for all of them: their A below each
        other, and their B along the diagonal."""
        adapters = self._model.adapters
        found = [] if adapters is None else [adapters.of(number, name) for name in projections]
        downs = [adapter.down_rI for adapter in found if adapter is not None]
        if adapters is None or not downs:
            return product
        shapes, scale = weight_shapes(self._config), adapters.scale
        ups = [
            self._embedding.new_zeros(shapes[f"{projection_name(number, name)}.weight"][0], 0)
            if adapter is None
            else adapter.up_Or.detach()
            for name, adapter in zip(projections, found, strict=True)
        ]
        down, up = product_of(torch.cat(downs)), product_of(torch.block_diag(*ups))
        return lambda x: product(x) + up(down(x) * scale)

    def _heads(self, qkv: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys rotated together: the second half of a head against the first, whose sine is negative."""
        heads, groups = self._config.num_heads, self._config.num_kv_heads
        qkv = qkv.view(len(qkv), -1, self._config.head_dim)
        qk, v = qkv.split([heads + groups, groups], 1)
        qk = qk.float()
        rotated = qk * cos_T1D + qk.roll(self._config.head_dim // 2, -1) * sin_T1D
        q, k = rotated.to(self.dtype).split([heads, groups], 1)
        return q, k, v

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self._config.rms_norm_eps).to(self.dtype)


def product_of(weight: Tensor) -> Product:
    """The weight as it is read fastest."""
    if not _packable(weight.dtype):
        return lambda x: F.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _packable(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
