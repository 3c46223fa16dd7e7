"""Checkpoints in the layout of Hugging Face: config.json, model.safetensors and, where given, tokenizer.json."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.models.numerics import Numerics


def save_checkpoint(model: Llama, folder: Path, companions: Mapping[str, bytes] | None = None) -> None:
    """Write the folder whole or not at all. `companions` (tokenizer.json, ...) are written beside the weights, by name.

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
        weights = {name: weight.detach().contiguous() for name, weight in model.named_weights().items()}
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        for name, content in (companions or {}).items():
            (target / name).write_bytes(content)
        os.rename(target, folder)


def load_checkpoint(
    folder: Path, *, vocab_size: int | None = None, dtype: torch.dtype | None = None, numerics: Numerics = Numerics.FAST
) -> Llama:
    """The model of a folder; `dtype` None keeps the stored one. Raises FileNotFoundError naming what is missing."""
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"expected a checkpoint folder with {name}, found none in {folder}")
    config = LlamaConfig.from_hf(json.loads((folder / "config.json").read_text()), vocab_size=vocab_size)
    weights = load_file(folder / "model.safetensors")
    stored = next(iter(weights.values())).dtype
    model = Llama(config, dtype=dtype or stored, numerics=numerics)
    model.load_weights({name: weight.to(model.dtype) for name, weight in weights.items()})
    return model
