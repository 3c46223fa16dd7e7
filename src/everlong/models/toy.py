"""A seeded llama of about 1.5M parameters over bytes, built by code: small enough to train in minutes on two cores."""

from __future__ import annotations

import torch

from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.models.numerics import Numerics


def toy_config() -> LlamaConfig:
    """256 bytes and four special tokens, padded to 264 rows."""
    return LlamaConfig(
        vocab_size=260,
        padded_vocab_size=264,
        hidden_size=128,
        intermediate_size=344,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=4096,
    )


@torch.no_grad()
def build_toy(seed: int, dtype: torch.dtype = torch.float32, numerics: Numerics = Numerics.FAST) -> Llama:
    """The same seed gives the same bits. Projections into the residual stream start smaller, by the depth (GPT-2)."""
    config = toy_config()
    model = Llama(config, dtype=dtype, numerics=numerics)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_weights().items():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
            continue
        std = 0.02 / (2 * config.num_layers) ** 0.5 if "o_proj" in name or "down_proj" in name else 0.02
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    return model
