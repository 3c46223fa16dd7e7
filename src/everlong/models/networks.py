"""The network of a shape, of whichever family."""

from __future__ import annotations

import torch

from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.models.llama.packed import PackedLlama
from everlong.models.moe.config import MoeConfig
from everlong.models.moe.model import MoeLlama
from everlong.models.moe.packed import PackedMoe
from everlong.models.numerics import Numerics


def empty_network(shape: LlamaConfig, dtype: torch.dtype = torch.float32, numerics: Numerics = Numerics.FAST) -> Llama:
    """With all weights 0."""
    family = MoeLlama if isinstance(shape, MoeConfig) else Llama
    return family(shape, dtype=dtype, numerics=numerics)


def packed_network(model: Llama) -> PackedLlama:
    """What samples with the model's weights, once they are packed."""
    return PackedMoe(model) if isinstance(model, MoeLlama) else PackedLlama(model)
