"""The llama network over flat tokens. Control flow is here; what attends to what is the caller's `attend`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from everlong.models.adapter_config import LoraConfig
from everlong.models.decisions import Decide, as_chosen
from everlong.models.llama.checkpoint_names import Shapes, projection_name, weight_shapes
from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.lora import Adapters, low_rank
from everlong.models.numerics import Numerics, linear, silu, widened

# T tokens, M model width, H query heads, G key-value heads, D head width


class Attend(Protocol):
    """What stands between the projections of a layer: keeps keys and values, and decides who sees whom."""

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """Rotated queries and keys in, [T, H, D] out."""
        ...


class Tap(Protocol):
    """What watches a pass, or changes its gradient."""

    def before_attention(self, layer: int, q_THD: Tensor, k_TGD: Tensor, attend: Attend) -> None:
        """Sees what will attend."""
        ...

    def after_layer(self, layer: int, hidden_TM: Tensor) -> Tensor:
        """The layer's hidden states in, what the next one gets out."""
        ...


class Llama(nn.Module):
    """Weights are float32 or bfloat16; the residual stream is float32. Aligned numerics compute in float32. With float64 weights,
    which no run has, everything is float64: what is exact can be told from what is rounded."""

    _cos: Tensor
    _sin: Tensor
    tap: Tap | None = None
    """Of the passes that make a gradient, while somebody asks."""

    def __init__(
        self, config: LlamaConfig, *, dtype: torch.dtype = torch.float32, numerics: Numerics = Numerics.FAST
    ) -> None:
        super().__init__()
        self.config, self.numerics = config, numerics
        self.adapters: Adapters | None = None
        shapes = self._shapes()
        self._names = list(shapes)
        self._weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes.values())
        angles = torch.arange(config.max_positions, dtype=torch.float64)[:, None] * config.rope_theta ** (
            -torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        )
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        self.register_buffer("_cos", angles.cos().to(wide), persistent=False)
        self.register_buffer("_sin", angles.sin().to(wide), persistent=False)

    def _shapes(self) -> Shapes:
        return weight_shapes(self.config)

    @property
    def num_layer_weights(self) -> int:
        """Weights of one layer; `named_weights` has them layer after layer."""
        return sum(name.startswith("model.layers.0.") for name in self._names)

    def named_weights(self) -> dict[str, Tensor]:
        """The parameters under their names in a Hugging Face checkpoint, in a fixed order."""
        return dict(zip(self._names, self._weights, strict=True))

    def adapt(self, config: LoraConfig, base_name: str | None = None) -> None:
        """Freeze the weights and put adapters beside them, which from now on are what trains; outputs stay as they are.

        `base_name`: of the frozen weights, for those who load the adapters elsewhere. Raises ValueError where there are
        adapters already.
        """
        if self.adapters is not None:
            raise ValueError("the model has adapters already: train them, or export it and adapt the checkpoint")
        for weight in self._weights:
            weight.requires_grad_(False)
        self.adapters = Adapters(self.config, config, self.dtype, base_name)

    def trained_weights(self) -> dict[str, Tensor]:
        """What an optimiser steps: the adapters where there are some, else every weight; in a fixed order."""
        return self.named_weights() if self.adapters is None else self.adapters.named()

    def frozen_weights(self) -> dict[str, Tensor]:
        """The others, which are never written; none without adapters."""
        return {} if self.adapters is None else self.named_weights()

    def twin(self) -> Llama:
        """A second network with the same weights. Those that train are copied, those that are frozen are the same tensors."""
        shared = {} if self.adapters is None else {id(self._weights): self._weights}
        return copy.deepcopy(self, shared)

    @torch.no_grad()
    def merged_weights(self) -> dict[str, Tensor]:
        """The weights of a checkpoint without adapters: W + scale B A, computed in float64 and rounded to the dtype once."""
        weights = {name: weight.detach() for name, weight in self.named_weights().items()}
        if self.adapters is None:
            return weights
        for layer in range(self.config.num_layers):
            for projection in self.adapters.targets:
                name, adapter = f"{projection_name(layer, projection)}.weight", self.adapters.of(layer, projection)
                assert adapter is not None
                change = self.adapters.scale * adapter.up_Or.double() @ adapter.down_rI.double()
                weights[name] = (weights[name].double() + change).to(self.dtype)
        return weights

    @property
    def dtype(self) -> torch.dtype:
        return self._weights[0].dtype

    @property
    def rotation(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position and pair, float32 [max_positions, D / 2]."""
        return self._cos, self._sin

    @property
    def head_weight(self) -> Tensor:
        """[padded_vocab_size, M]"""
        return self._weights[0 if self.config.tie_embeddings else -1]

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy into the existing storage, adapters included. Raises ValueError, before anything is changed, unless names,
        shapes and dtypes match."""
        self._load(weights, {**self.frozen_weights(), **self.trained_weights()})

    def load_trained_weights(self, weights: Mapping[str, Tensor]) -> None:
        """As `load_weights`, of what trains alone."""
        self._load(weights, self.trained_weights())

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        if missing := sorted(own.keys() ^ weights.keys()):
            raise ValueError(f"weights do not match the model: {missing[:4]} stand on one side only")
        for name, target in own.items():
            source = weights[name]
            if source.shape != target.shape or source.dtype != target.dtype:
                raise ValueError(
                    f"weight {name} is {source.dtype}{list(source.shape)}, the model holds {target.dtype}{list(target.shape)}"
                )
        for name, target in own.items():
            target.copy_(weights[name])

    def forward(self, ids_T: Tensor, positions_T: Tensor, attend: Attend, decide: Decide = as_chosen) -> Tensor:
        """Hidden state [T, M] in float32 after the final norm. `decide` settles what `config.decisions` names."""
        weights = iter(self._weights)
        hidden = widened(F.embedding(ids_T, next(weights)))
        rotation = self._cos[positions_T][:, None], self._sin[positions_T][:, None]
        for layer in range(self.config.num_layers):
            own = [next(weights) for _ in range(self.num_layer_weights)]
            hidden = self._block(layer, hidden, rotation, attend, decide, own)
            hidden = hidden if self.tap is None else self.tap.after_layer(layer, hidden)
        return self._norm(hidden, next(weights))

    def logits(self, hidden_TM: Tensor) -> Tensor:
        """float32 [T, padded_vocab_size]; rows that no token has are not hidden."""
        return widened(linear(hidden_TM, self.head_weight, self.numerics))

    def _block(
        self,
        layer: int,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        attend: Attend,
        decide: Decide,
        weights: list[Tensor],
    ) -> Tensor:
        norm_in, q_proj, k_proj, v_proj, o_proj, norm_mlp, *mlp = weights
        x = self._norm(hidden, norm_in)
        heads = (("q_proj", q_proj), ("k_proj", k_proj), ("v_proj", v_proj))
        q, k, v = (self.project(layer, name, x, w).view(len(x), -1, self.config.head_dim) for name, w in heads)
        q, k = _rotate(q, *rotation), _rotate(k, *rotation)
        if self.tap is not None:
            self.tap.before_attention(layer, q, k, attend)
        mixed = attend(layer, q, k, v)
        hidden = hidden + widened(self.project(layer, "o_proj", mixed.flatten(1), o_proj))
        return hidden + widened(self._mlp(layer, self._norm(hidden, norm_mlp), mlp, decide))

    def _mlp(self, layer: int, x: Tensor, weights: list[Tensor], decide: Decide) -> Tensor:
        gate_proj, up_proj, down_proj = weights
        gated = silu(self.project(layer, "gate_proj", x, gate_proj), self.numerics)
        gated = gated * self.project(layer, "up_proj", x, up_proj)
        return self.project(layer, "down_proj", gated, down_proj)

    def project(self, layer: int, projection: str, x: Tensor, weight: Tensor) -> Tensor:
        """x[T, I] times the projection's weight, and what its adapter adds, [T, O]."""
        product = linear(x, weight, self.numerics)
        adapter = None if self.adapters is None else self.adapters.of(layer, projection)
        if self.adapters is None or adapter is None:
            return product
        return product + low_rank(x, adapter, self.adapters.scale, self.numerics)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], widened(weight), self.config.rms_norm_eps)


def _rotate(x_THD: Tensor, cos_T1: Tensor, sin_T1: Tensor) -> Tensor:
    """Rotary positions in the layout of Hugging Face checkpoints: first half against second half."""
    first, second = widened(x_THD).chunk(2, -1)
    return torch.cat([first * cos_T1 - second * sin_T1, second * cos_T1 + first * sin_T1], -1).to(x_THD.dtype)
