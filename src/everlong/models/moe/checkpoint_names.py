"""Names of the weights in a Hugging Face checkpoint of Mixtral, and their shapes: matrices apart for every expert."""

from __future__ import annotations

from everlong.models.llama.checkpoint_names import Shapes
from everlong.models.llama.config import LlamaConfig
from everlong.models.moe.config import MoeConfig

MATRICES = ("w1", "w3", "w2")
"""Of an expert: gate, up and down."""


def expert_shapes(config: LlamaConfig) -> Shapes:
    """What stands behind the second norm of a layer, by its name below `model.layers.N`: the router, then expert by expert."""
    assert isinstance(config, MoeConfig)
    width, inner = config.hidden_size, config.intermediate_size
    shapes: Shapes = {"block_sparse_moe.gate.weight": (config.num_experts, width)}
    for expert in range(config.num_experts):
        for matrix in MATRICES:
            shape = (width, inner) if matrix == "w2" else (inner, width)
            shapes[f"block_sparse_moe.experts.{expert}.{matrix}.weight"] = shape
    return shapes
