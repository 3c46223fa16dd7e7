"""Which network the run trains. Light: importing it loads no torch."""

from typing import Literal

from pydantic import Field

from everlong.contracts.config import Config


class ModelConfig(Config):
    type: Literal["toy", "scripted"] = "toy"
    """toy: a seeded llama of about 1.5M parameters over bytes, built by code. scripted: no network and no torch; it plays
    a fixed part, to try tasks, sandboxes and a set-up."""
    seed: int = Field(0, ge=0)
    """Of the initial weights."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights that are published and that engines load; masters are float32 always."""
