"""Keys and values of all layers, in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from everlong.models.llama.config import LlamaConfig

# T tokens, B sequences, N blocks per sequence, S keys (N blocks in a row), G key-value heads, D head width


class KeyValueCache:
    """A token's slot is its block times `block_tokens` plus its place in the block."""

    def __init__(self, config: LlamaConfig, num_blocks: int, block_tokens: int, dtype: torch.dtype) -> None:
        shape = (config.num_layers, num_blocks, block_tokens, config.num_kv_heads, config.head_dim)
        # zeros, since what is masked is still multiplied by 0, and whatever stood in memory might be a NaN
        self._keys, self._values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    def write(self, layer: int, slots_T: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
        for cached, new in ((self._keys[layer], k_TGD), (self._values[layer], v_TGD)):
            cached.flatten(0, 1).index_copy_(0, slots_T, new.to(cached.dtype))

    def read(self, layer: int, blocks_BN: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, S, G, D] of every sequence, at their positions; behind a sequence's end stands anything."""
        keys, values = (
            cached[layer].index_select(0, blocks_BN.flatten()).view(len(blocks_BN), -1, *cached.shape[3:])
            for cached in (self._keys, self._values)
        )
        return keys, values
