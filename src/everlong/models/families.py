"""Which family a checkpoint is of, by what its config.json says. No torch."""

from __future__ import annotations

from typing import Any

from everlong.models.llama.config import LlamaConfig
from everlong.models.moe.config import MIXTRAL, OWN, MoeConfig


def read_shape(config: dict[str, Any], *, vocab_size: int | None = None) -> LlamaConfig:
    """From the content of config.json; `vocab_size` is the tokenizer's where the embedding is padded. Raises ValueError for a
    family that is not supported, and for what the family does not honour."""
    family = MoeConfig if config.get("model_type") in (MIXTRAL, OWN) else LlamaConfig
    return family.from_hf(config, vocab_size=vocab_size)
