"""Where a run's model comes from: its shape, and the folder that holds its files. No torch, so the control process asks too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from everlong.contracts.import_path import call_named, load_named
from everlong.models.config import (
    FolderModel,
    HubModel,
    ModelConfig,
    OwnModel,
    ScriptedModel,
    Smollm2Model,
    ToyModel,
    ToyMoeModel,
)
from everlong.models.families import read_shape
from everlong.models.llama.config import LlamaConfig
from everlong.models.moe.config import MoeConfig
from everlong.models.smollm2 import is_converted, smollm2_folder

if TYPE_CHECKING:
    import torch

    from everlong.models.llama.model import Llama
    from everlong.models.numerics import Numerics

CHECKPOINT_FILES = ("config.json", "model.safetensors", "tokenizer.json")
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
"""What lies beside the weights and goes with them into every checkpoint that a run exports."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    shape: LlamaConfig
    """Of a checkpoint as its config.json says it: rows that pad the vocabulary count as tokens here."""
    folder: Path | None
    """Where the files are; None where the model is built by code."""
    build: Callable[[LlamaConfig, torch.dtype, Numerics], Llama] | None = None
    """Makes the network of this shape, with its weights; only the worker calls it, so torch is imported inside. None where
    the weights are those of the folder, or everlong's own."""

    def companions(self) -> dict[str, bytes]:
        """The files beside the weights, by name."""
        folder = self.folder
        if folder is None:
            return {}
        return {name: (folder / name).read_bytes() for name in COMPANIONS if (folder / name).is_file()}


def find_model(config: ModelConfig) -> ModelSource:
    """Converts or downloads what is not here yet.

    Raises FileNotFoundError naming what is missing; ValueError where the checkpoint's family is not supported, or where a
    name of code leads to no source.
    """
    if isinstance(config, OwnModel):
        return _own_source(config.source)
    shape = shape_built_by_code(config)
    if shape is not None:
        return ModelSource(shape, None)
    folder = _folder_of(config)
    for name in CHECKPOINT_FILES:
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"expected a checkpoint folder with {', '.join(CHECKPOINT_FILES)}, found no {name} in {folder}"
            )
    return ModelSource(read_shape(json.loads((folder / "config.json").read_text())), folder)


def shape_built_by_code(config: ModelConfig) -> LlamaConfig | None:
    """Of our own toys, and of the scripted model, which has a toy's tokens; None where files or another's code say it."""
    match config:
        case ToyModel() | ScriptedModel():
            return toy_config()
        case ToyMoeModel():
            return toy_moe_config(config)
        case _:
            return None


def is_model_here(config: ModelConfig) -> bool:
    """Whether `find_model` has nothing to convert or to download. Raises FileNotFoundError where a package for it is missing."""
    if isinstance(config, Smollm2Model):
        return is_converted()
    return not isinstance(config, HubModel) or _is_in_cache(config)


def _own_source(path: str) -> ModelSource:
    function = load_named(path)
    source = call_named(path, function) if callable(function) else function
    if not isinstance(source, ModelSource) or (source.build is None and source.folder is None):
        raise ValueError(
            f"model.source={path} must name a function that returns a ModelSource with a folder or with build, got {source!r}"
        )
    return source


def toy_config() -> LlamaConfig:
    """256 bytes and four special tokens, padded to 264 rows."""
    return LlamaConfig(
        vocab_size=260,
        padded_vocab_size=264,
        hidden_size=128,
        intermediate_size=344,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=4096,
    )


def toy_moe_config(config: ToyMoeModel) -> MoeConfig:
    """The toy's tokens and heads, two layers less, and eight experts of 88."""
    return MoeConfig(
        vocab_size=260,
        padded_vocab_size=264,
        hidden_size=128,
        intermediate_size=88,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_positions=4096,
        router=config.router,
        normalised=config.normalised,
    )


def _folder_of(config: ModelConfig) -> Path:
    match config:
        case Smollm2Model():
            return smollm2_folder()
        case FolderModel():
            return config.path
        case HubModel():
            return _snapshot(config)
        case _:
            raise AssertionError(f"model {config.type} is built by code")


def _need_hub(config: HubModel) -> None:
    if find_spec("huggingface_hub") is None:
        raise FileNotFoundError(
            f"model {config.repo} is on the Hugging Face hub, and the Python package huggingface_hub is not installed: "
            "pip install huggingface_hub, or give model.type=folder a local copy"
        )


def _is_in_cache(config: HubModel) -> bool:
    _need_hub(config)
    from huggingface_hub import try_to_load_from_cache

    return all(
        isinstance(try_to_load_from_cache(config.repo, name, revision=config.revision), str)
        for name in CHECKPOINT_FILES
    )


def _snapshot(config: HubModel) -> Path:
    """The repository's files in huggingface_hub's own cache; offline where HF_HUB_OFFLINE says so."""
    _need_hub(config)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            config.repo, revision=config.revision, allow_patterns=[*CHECKPOINT_FILES, *COMPANIONS]
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise FileNotFoundError(
            f"could not get {config.repo} at {config.revision} from the Hugging Face hub ({error}): check the name, the "
            "revision and the network, or give model.type=folder a local copy"
        ) from error
    return Path(folder)
