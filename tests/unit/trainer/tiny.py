"""A llama of two small layers, the same in every test of the trainer, and one with experts."""

import torch

from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.models.moe.config import MoeConfig
from everlong.models.networks import empty_network
from everlong.models.numerics import Numerics

SHAPE = LlamaConfig(
    vocab_size=11, padded_vocab_size=16, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=4, max_positions=64,
)  # fmt: skip


def tiny(dtype=torch.float32, numerics=Numerics.FAST):
    return filled(Llama(SHAPE, dtype=dtype, numerics=numerics))


def moe_shape(**changes):
    return MoeConfig(
        vocab_size=11, padded_vocab_size=16, hidden_size=16, intermediate_size=12, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=4, max_positions=64, **{"num_experts": 4, "experts_per_token": 2, **changes},
    )  # fmt: skip


def tiny_moe(numerics=Numerics.FAST, dtype=torch.float32, **changes):
    return filled(empty_network(moe_shape(**changes), dtype, numerics))


def filled(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_weights().items():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4 + ("norm" in name))
    return model
