"""Settings of the engine that lives in the worker. Light: importing it loads no torch."""

from __future__ import annotations

from pydantic import Field, model_validator

from everlong.contracts.config import Config


class EmbeddedConfig(Config):
    max_running: int = Field(64, ge=1)
    """Requests decoded together; the rest wait in the order in which they came."""
    prefill_chunk_tokens: int = Field(512, ge=1)
    """Prompt tokens computed per step, so that a long prompt does not hold up those who decode."""
    block_tokens: int = Field(16, ge=1)
    """Tokens whose keys and values are kept, shared and freed together."""
    cache_tokens: int = Field(32768, ge=1)
    """Tokens whose keys and values fit into memory, over all requests; when they run out the newest request is put back."""
    prefix_cache: bool = True
    """Keep what was computed for a prompt and use it for the next one that begins with the same tokens."""
    max_context: int | None = Field(None, ge=2)
    """Tokens of prompt and answer together; None is what the model was built for."""

    @model_validator(mode="after")
    def _fits(self) -> EmbeddedConfig:
        if self.cache_tokens % self.block_tokens:
            raise ValueError(
                f"cache_tokens must be a multiple of block_tokens, got {self.cache_tokens} and {self.block_tokens}"
            )
        if self.max_context is not None:
            self.context(self.max_context)
        return self

    def context(self, max_positions: int) -> int:
        """Tokens a request may have in all, for a model of `max_positions`. Raises ValueError where they would not fit."""
        context = max_positions if self.max_context is None else self.max_context
        if context > max_positions:
            raise ValueError(f"max_context {context} exceeds the {max_positions} positions that the model has")
        if context > self.cache_tokens:
            raise ValueError(
                f"cache_tokens {self.cache_tokens} must hold one request of the whole context of {context} tokens: "
                "raise cache_tokens or lower max_context"
            )
        return context
