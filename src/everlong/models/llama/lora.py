"""Low-rank adapters beside a llama's frozen projections: W x + scale B (A x), scale = alpha / rank

A[r, in] starts Gaussian with variance 1 / in, B[out, r] at 0 (Hu et al. 2021, arXiv:2106.09685). Engine and trainer both add
the adapter's product to the frozen one; neither merges. So their products are the same and agree to the bit in aligned
numerics, a step needs no gradient of a whole matrix, an engine keeps the frozen weights as it packed them, and in bfloat16
the update is not rounded away against W, as it would be inside W + scale B A.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from everlong.models.adapter_config import LoraConfig
from everlong.models.llama.checkpoint_names import PROJECTIONS, projection_name, weight_shapes
from everlong.models.llama.config import LlamaConfig
from everlong.models.numerics import Numerics, linear

# T tokens, I features in, O features out, r rank


class Adapter(NamedTuple):
    """Of one projection."""

    down_rI: Tensor
    """A of the paper."""
    up_Or: Tensor
    """B of the paper."""


class Adapters(nn.Module):
    """The adapters of every layer, all of one rank, in a fixed order. The same seed gives the same bits."""

    def __init__(self, shape: LlamaConfig, config: LoraConfig, dtype: torch.dtype, base_name: str | None) -> None:
        """`base_name`: what the frozen weights are called where others load the adapters; None where they have no name."""
        super().__init__()
        self.config, self.scale, self.base_name = config, config.alpha / config.rank, base_name
        shapes, generator = weight_shapes(shape), torch.Generator().manual_seed(config.seed)
        self.targets = tuple(name for name in PROJECTIONS if name in config.targets)
        self._names: list[str] = []
        self._tensors = nn.ParameterList()
        for layer in range(shape.num_layers):
            for projection in self.targets:
                name = projection_name(layer, projection)
                rows, columns = shapes[f"{name}.weight"]
                down = torch.randn(config.rank, columns, generator=generator) / columns**0.5
                self._names += [f"{name}.lora_A.weight", f"{name}.lora_B.weight"]
                self._tensors.append(nn.Parameter(down.to(dtype)))
                self._tensors.append(nn.Parameter(torch.zeros(rows, config.rank, dtype=dtype)))

    def named(self) -> dict[str, Tensor]:
        """By the projection's name in the checkpoint, with `.lora_A.weight` and `.lora_B.weight` behind it, as PEFT has them."""
        return dict(zip(self._names, self._tensors, strict=True))

    def of(self, layer: int, projection: str) -> Adapter | None:
        """None where the projection has none."""
        if projection not in self.targets:
            return None
        place = 2 * (layer * len(self.targets) + self.targets.index(projection))
        return Adapter(self._tensors[place], self._tensors[place + 1])


def low_rank(x_TI: Tensor, adapter: Adapter, scale: float, numerics: Numerics) -> Tensor:
    """scale B (A x), [T, O]. Aligned: a row's bits depend on that row alone, as with `linear`."""
    return linear(linear(x_TI, adapter.down_rI, numerics) * scale, adapter.up_Or, numerics)
