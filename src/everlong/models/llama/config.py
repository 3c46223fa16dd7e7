"""Shape of a llama, to and from Hugging Face's config.json. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from everlong.contracts.decisions import DecisionShape


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    vocab_size: int
    """Tokens that exist; ids from here to `padded_vocab_size` have probability 0."""
    padded_vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = True
    max_positions: int = 4096

    def __post_init__(self) -> None:
        if self.padded_vocab_size < self.vocab_size:
            raise ValueError(f"padded_vocab_size {self.padded_vocab_size} is below vocab_size {self.vocab_size}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")

    @property
    def decisions(self) -> dict[str, DecisionShape]:
        """What the network decides per token by choice, and computes for what was chosen, by name; a llama nothing."""
        return {}

    @classmethod
    def from_hf(cls, config: dict[str, Any], *, vocab_size: int | None = None) -> LlamaConfig:
        """From the content of config.json; `vocab_size` is the tokenizer's where the embedding is padded.

        Our own checkpoints say it themselves (`unpadded_vocab_size`, a key that others ignore). Raises ValueError for
        what this family does not honour: another architecture or activation, biases, scaled rotary positions.
        """
        if config.get("model_type") != "llama":
            raise ValueError(f"expected a llama checkpoint, config.json says model_type {config.get('model_type')!r}")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(f"config.json sets hidden_act={config['hidden_act']!r}, only 'silu' is supported")
        for key in ("attention_bias", "mlp_bias", "rope_scaling"):
            if config.get(key):
                raise ValueError(f"config.json sets {key}={config[key]!r}, which is not supported")
        rope = config.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"rotary type {rope['rope_type']!r} is not supported, only 'default'")
        rows, heads = config["vocab_size"], config["num_attention_heads"]
        return cls(
            vocab_size=vocab_size or config.get("unpadded_vocab_size", rows),
            padded_vocab_size=rows,
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rope_theta=float(config.get("rope_theta") or rope.get("rope_theta", 10000.0)),
            rms_norm_eps=config["rms_norm_eps"],
            tie_embeddings=config.get("tie_word_embeddings", False),
            max_positions=config["max_position_embeddings"],
        )

    def to_hf(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.padded_vocab_size,
            "unpadded_vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            "max_position_embeddings": self.max_positions,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }
