"""Checkpoints in the layout of Hugging Face: config.json, model.safetensors and, where given, tokenizer.json."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from everlong.models.families import read_shape
from everlong.models.llama.lora import Adapters
from everlong.models.llama.model import Llama
from everlong.models.networks import empty_network
from everlong.models.numerics import Numerics

ADAPTER = "adapter"
"""Folder of the adapters inside a checkpoint."""


def save_checkpoint(model: Llama, folder: Path, companions: Mapping[str, bytes] | None = None) -> None:
    """Write the folder whole or not at all. `companions` (tokenizer.json, ...) are written beside the weights, by name.

    A model with adapters is written merged, and its adapters alone, as PEFT reads them, in the folder `adapter` inside.
    Raises FileExistsError when the folder is there already.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists: choose another folder for the checkpoint")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        target = Path(scratch) / "checkpoint"
        target.mkdir()
        config = {**model.config.to_hf(), "dtype": str(model.dtype).removeprefix("torch.")}
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _save(model.merged_weights(), target / "model.safetensors")
        if model.adapters is not None:
            _save_adapters(model.adapters, target / ADAPTER)
        for name, content in (companions or {}).items():
            (target / name).write_bytes(content)
        os.rename(target, folder)


def _save_adapters(adapters: Adapters, folder: Path) -> None:
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapters.base_name,
        "r": adapters.config.rank,
        "lora_alpha": adapters.config.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(adapters.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {f"base_model.model.{name}": tensor for name, tensor in adapters.named().items()}
    _save(tensors, folder / "adapter_model.safetensors")


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file({name: t.detach().contiguous() for name, t in tensors.items()}, path, metadata={"format": "pt"})


def load_checkpoint(
    folder: Path, *, vocab_size: int | None = None, dtype: torch.dtype | None = None, numerics: Numerics = Numerics.FAST
) -> Llama:
    """The model of a folder; `dtype` None keeps the stored one. Raises FileNotFoundError naming what is missing."""
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"expected a checkpoint folder with {name}, found none in {folder}")
    config = read_shape(json.loads((folder / "config.json").read_text()), vocab_size=vocab_size)
    weights = load_file(folder / "model.safetensors")
    stored = next(iter(weights.values())).dtype
    model = empty_network(config, dtype or stored, numerics)
    model.load_weights({name: weight.to(model.dtype) for name, weight in weights.items()})
    return model
