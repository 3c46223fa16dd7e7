"""Which engine samples, and its settings. Light: importing it loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from everlong.contracts.config import Config


class EmbeddedConfig(Config):
    """Our own engine, in the worker, beside the trainer."""

    type: Literal["embedded"] = "embedded"
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
        context = _context(self.max_context, max_positions)
        if context > self.cache_tokens:
            raise ValueError(
                f"cache_tokens {self.cache_tokens} must hold one request of the whole context of {context} tokens: "
                "raise cache_tokens or lower max_context"
            )
        return context


OWN_ARGUMENTS = (
    "--model",
    "--load-format",
    "--tokens-only",
    "--dtype",
    "--max-model-len",
    "--max-num-seqs",
    "--kv-cache-memory-bytes",
    "--enable-prefix-caching",
    "--no-enable-prefix-caching",
    "--enforce-eager",
    "--logprobs-mode",
    "--max-logprobs",
    "--generation-config",
    "--enable-prompt-tokens-details",
    "--worker-extension-cls",
    "--weight-transfer-config",
    "--uds",
    "--host",
    "--port",
)
"""Arguments of the server that settings decide, or that the engine depends on."""


class VllmConfig(Config):
    """A vLLM server in an environment of its own (`make vllm`), or one that runs already."""

    type: Literal["vllm"] = "vllm"
    url: str | None = Field(None, pattern=r"^https?://")
    """Of a server that runs already, started as docs/engines.md says; None starts one that ends with the run."""
    python: Path | None = None
    """Python of the environment with vLLM; None is what EVERLONG_VLLM names, else .venv-vllm/bin/python."""
    max_running: int = Field(64, ge=1)
    """Requests decoded together; the rest wait in the order in which they came."""
    max_context: int | None = Field(None, ge=2)
    """Tokens of prompt and answer together; None is what the model was built for."""
    cache_mb: int = Field(1024, ge=1)
    """MiB for keys and values, over all requests."""
    prefix_cache: bool = True
    """Keep what was computed for a prompt and use it for the next one that begins with the same tokens."""
    compile: bool = False
    """Compile the model at the start: a minute or more of starting, for faster steps."""
    start_timeout_s: float = Field(600.0, gt=0)
    """How long a server may take until it answers, at the start and after it was lost."""
    max_restarts: int = Field(3, ge=0)
    """How often in a row, without an answer between, a lost server is started again or waited for."""
    arguments: tuple[str, ...] = ()
    """Further arguments of the server, for example ["--tensor-parallel-size", "8"]."""

    @model_validator(mode="after")
    def _effective(self) -> VllmConfig:
        if self.url is not None:
            fields = ("python", "max_running", "cache_mb", "prefix_cache", "compile", "arguments")
            settled = [name for name in fields if getattr(self, name) != type(self).model_fields[name].default]
            if settled:
                raise ValueError(
                    f"{', '.join(settled)} of the engine has no effect on the server that runs at {self.url}"
                )
        own = [word for word in self.arguments if word.split("=")[0] in OWN_ARGUMENTS]
        if own:
            raise ValueError(
                f"arguments holds {own[0]}, which the engine sets itself: see the other settings of engine"
            )
        return self

    @property
    def returns_sampling_mask(self) -> bool:
        """Whether the server says which tokens truncation left; vLLM does on GPUs only."""
        return "--return-sampling-mask" in self.arguments

    def context(self, max_positions: int) -> int:
        """Tokens a request may have in all, for a model of `max_positions`. Raises ValueError where they do not fit."""
        return _context(self.max_context, max_positions)


MemberConfig = Annotated[EmbeddedConfig | VllmConfig, Field(discriminator="type")]


class PoolConfig(Config):
    """Several engines that serve one run."""

    type: Literal["pool"] = "pool"
    members: tuple[MemberConfig, ...] = Field(min_length=1, max_length=1000)
    """The engines, each with the settings of its type: [[engine.members]] tables in a file."""
    mismatch_bound: float = Field(0.3, gt=0, allow_inf_nan=False)
    """Nats per token by which an engine's logprobs may differ from the trainer's in the mean; beyond it is quarantined."""
    mismatch_tokens: int = Field(1000, ge=1)
    """Newest tokens of an engine over which that mean is taken; with fewer it is not judged."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the members, in their order: "0-embedded", "1-vllm"."""
        return tuple(f"{number}-{member.type}" for number, member in enumerate(self.members))

    def context(self, max_positions: int) -> int:
        """Tokens that every member has for a request. Raises ValueError where they do not fit into one."""
        return min(member.context(max_positions) for member in self.members)


AnyEngineConfig = EmbeddedConfig | VllmConfig | PoolConfig
EngineConfig = Annotated[AnyEngineConfig, Field(discriminator="type")]


def engines_of(config: AnyEngineConfig) -> tuple[EmbeddedConfig | VllmConfig, ...]:
    """The engines that sample: a pool's members, or the one."""
    return config.members if isinstance(config, PoolConfig) else (config,)


def _context(wanted: int | None, max_positions: int) -> int:
    context = max_positions if wanted is None else wanted
    if context > max_positions:
        raise ValueError(f"max_context {context} exceeds the {max_positions} positions that the model has")
    return context
