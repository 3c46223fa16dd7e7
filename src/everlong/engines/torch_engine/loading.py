"""Between raw bits and the model's parameters."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from everlong.models.llama.model import Llama
from everlong.weights import RawTensor, WeightSet, fingerprint
from everlong.weights.tensors import WeightDtype

_DTYPES = {
    "float32": (torch.float32, torch.uint32),
    "bfloat16": (torch.bfloat16, torch.uint16),
}


def load_weight_set(model: Llama, weights: WeightSet) -> None:
    """Copy into the parameters in place. Raises ValueError, before anything is changed, where they do not fit."""
    model.load_weights({name: _tensor_of(raw) for name, raw in {**weights.frozen, **weights.tensors}.items()})


def load_adapters(model: Llama, weights: WeightSet) -> None:
    """As `load_weight_set`, where the model holds the frozen weights already."""
    model.load_trained_weights({name: _tensor_of(raw) for name, raw in weights.tensors.items()})


def fingerprint_of_model(model: Llama) -> str:
    """Of the bits that the next token will be computed with, frozen ones and adapters included."""
    held = {**model.frozen_weights(), **model.trained_weights()}
    return fingerprint({name: _raw_of(weight) for name, weight in held.items()})


def _tensor_of(raw: RawTensor) -> Tensor:
    bits = raw.bits if raw.bits.flags.writeable else raw.bits.copy()  # torch warns of memory it could not write to
    return torch.from_numpy(np.ascontiguousarray(bits)).view(_DTYPES[raw.dtype][0])


def _raw_of(weight: Tensor) -> RawTensor:
    name: WeightDtype = "bfloat16" if weight.dtype is torch.bfloat16 else "float32"
    bits = weight.detach().contiguous().view(_DTYPES[name][1]).numpy()
    return RawTensor(name, tuple(weight.shape), bits)
