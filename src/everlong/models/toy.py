"""Seeded networks over bytes, built by code: small enough to train in minutes on two cores.

The toy is a llama of about 1.5M parameters, its sister has experts and about 2M.
"""

from __future__ import annotations

import torch

from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.models.networks import empty_network
from everlong.models.numerics import Numerics
from everlong.models.source import toy_config


def build_toy(seed: int, dtype: torch.dtype = torch.float32, numerics: Numerics = Numerics.FAST) -> Llama:
    return random_llama(toy_config(), seed, dtype, numerics)


@torch.no_grad()
def random_llama(
    config: LlamaConfig, seed: int, dtype: torch.dtype = torch.float32, numerics: Numerics = Numerics.FAST
) -> Llama:
    """Of any family. The same seed gives the same bits. Projections into the residual stream start smaller, by the depth (GPT-2)."""
    model = empty_network(config, dtype, numerics)
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_weights().items():
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
            continue
        into_residual = any(part in name for part in ("o_proj", "down_proj", ".w2."))
        std = 0.02 / (2 * config.num_layers) ** 0.5 if into_residual else 0.02
        weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    return model
