"""Names of the weights in a Hugging Face llama checkpoint, and their shapes."""

from __future__ import annotations

from collections.abc import Callable

from everlong.models.llama.config import LlamaConfig

PROJECTIONS = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}
"""The matrices of a layer: what they are called for short, and below `model.layers.N`."""


def projection_name(layer: int, projection: str) -> str:
    """Of the module in the checkpoint; its weight is called `.weight` more."""
    return f"model.layers.{layer}.{PROJECTIONS[projection]}"


Shapes = dict[str, tuple[int, ...]]


def mlp_shapes(config: LlamaConfig) -> Shapes:
    """What stands behind the second norm of a layer, by its name below `model.layers.N`."""
    width, inner = config.hidden_size, config.intermediate_size
    return {
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
    }


def weight_shapes(config: LlamaConfig, mlp: Callable[[LlamaConfig], Shapes] = mlp_shapes) -> Shapes:
    """Every weight of the checkpoint in a fixed order, rows first (out_features, in_features)."""
    width, q = config.hidden_size, config.num_heads * config.head_dim
    kv = config.num_kv_heads * config.head_dim
    shapes: Shapes = {"model.embed_tokens.weight": (config.padded_vocab_size, width)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (width,)
        shapes[prefix + "self_attn.q_proj.weight"] = (q, width)
        shapes[prefix + "self_attn.k_proj.weight"] = (kv, width)
        shapes[prefix + "self_attn.v_proj.weight"] = (kv, width)
        shapes[prefix + "self_attn.o_proj.weight"] = (width, q)
        shapes[prefix + "post_attention_layernorm.weight"] = (width,)
        shapes |= {prefix + name: shape for name, shape in mlp(config).items()}
    shapes["model.norm.weight"] = (width,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.padded_vocab_size, width)
    return shapes
