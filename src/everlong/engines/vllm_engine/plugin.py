"""What runs inside vLLM: a weight transfer engine that reads our object store, and the worker's report of what it holds.

vLLM imports this by `--worker-extension-cls`; importing it registers the transfer backend "everlong". A version is read
and verified whole before the model is touched, so a version that cannot be read leaves the weights as they were. Written
against vLLM 0.32, whose layer-wise reload puts new values into the storage that kernels already use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.distributed.weight_transfer.base import (  # ty: ignore[import-not-found]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # ty: ignore[import-not-found]
from vllm.model_executor.layers.linear import LinearBase  # ty: ignore[import-not-found]
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead  # ty: ignore[import-not-found]
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload  # ty: ignore[import-not-found]

from everlong import __version__
from everlong.storage import open_store
from everlong.weights import RawTensor, WeightReader, WeightSet, fingerprint

BACKEND = "everlong"
ROWS_OF_TOKENS = ("embed_tokens.weight", "lm_head.weight")
NUM_PROBED_COLUMNS = 16
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class StoreInit(WeightTransferInitInfo):
    store: str
    """URL of the object store, or an absolute folder."""


@dataclass
class VersionUpdate(WeightTransferUpdateInfo):
    version: int


class StoreTransfer(WeightTransferEngine[StoreInit, VersionUpdate]):
    """Pulls a published version out of the store, each worker by itself, and loads it in place."""

    init_info_cls = StoreInit
    update_info_cls = VersionUpdate
    supports_draft_weight_update = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._reader: WeightReader | None = None
        self._held: WeightSet | None = None
        """The bits of the version that the model holds: the base of the next delta."""
        self._num_checked = 0

    def init_transfer_engine(self, init_info: StoreInit) -> None:
        self._reader = WeightReader(open_store(init_info.store))

    def start_weight_update(self) -> None:
        """Nothing yet: the model is touched once the version was read whole."""

    def receive_weights(self, update_info: VersionUpdate) -> None:
        """Raises StaleWeights or StoreError with the model untouched, RuntimeError where the model did not take it."""
        if self._reader is None:
            raise RuntimeError("no store is known yet: call /init_weight_transfer_engine with its URL first")
        weights = self._reader.read(update_info.version, self._held)
        self._held = None  # until all of it is loaded the model holds no version
        initialize_layerwise_reload(self.model)
        self.model.load_weights(self._tensors(weights))
        finalize_layerwise_reload(self.model, self.model_config)
        self._pack_tied_head_again()
        self._num_checked = self._check_parameters(weights) + self._check_matmuls(weights)
        self._held = weights

    def finish_weight_update(self) -> None:
        """Nothing left: `receive_weights` is the whole update."""

    def shutdown(self) -> None:
        self._reader = self._held = None

    def report(self) -> dict[str, Any]:
        """Version and fingerprint of what the model was loaded with, None where it holds no whole version."""
        held = self._held
        return {
            "everlong": __version__,
            "version": None if held is None else held.version,
            "fingerprint": None if held is None else fingerprint(held),
            "num_checked": self._num_checked,
        }

    def _tensors(self, weights: WeightSet) -> Iterator[tuple[str, torch.Tensor]]:
        """Rows that only pad the vocabulary stay out: no token may be sampled from them."""
        for name, raw in weights.tensors.items():
            tensor = _tensor_of(raw)
            yield name, tensor[: self._vocab_size] if name.endswith(ROWS_OF_TOKENS) else tensor

    @property
    def _vocab_size(self) -> int:
        return self.model_config.hf_text_config.vocab_size

    def _pack_tied_head_again(self) -> None:
        """A head tied to the embedding is not loaded by itself, and on a CPU it computes with a packed copy of its own."""
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead) and self.model_config.hf_text_config.tie_word_embeddings:
                module.quant_method.process_weights_after_loading(module)

    def _check_parameters(self, weights: WeightSet) -> int:
        """Compare the bits of every tensor that the model keeps whole under its own name; returns how many those are."""
        published, checked = dict(self._tensors(weights)), 0
        for name, parameter in self.model.named_parameters():
            expected = published.get(name)
            if expected is None or not parameter.numel() or parameter.shape[1:] != expected.shape[1:]:
                continue
            found = parameter.detach()[: len(expected)].cpu()
            if found.dtype == expected.dtype and len(found) == len(expected):
                _compare(found, expected, name, weights.version)
                checked += 1
        return checked

    def _check_matmuls(self, weights: WeightSet) -> int:
        """Compare the bits of columns that each linear layer computes with, fused and packed as it is; returns how many.

        The product with a row of zeros and a single one is a column of the weight, exactly. The columns are others for
        every version. Layers that are sharded over workers are left out.
        """
        published, random = dict(self._tensors(weights)), np.random.default_rng(weights.version)
        fused: dict[str, list[str]] = getattr(self.model, "packed_modules_mapping", {})
        checked = 0
        for name, module in self.model.named_modules():
            if not isinstance(module, LinearBase | ParallelLMHead):
                continue
            prefix, _, last = name.rpartition(".")
            names = [f"{prefix}.{part}.weight".lstrip(".") for part in fused.get(last, [last])]
            if names == ["lm_head.weight"] and "lm_head.weight" not in published:
                names = ["model.embed_tokens.weight"]
            if not all(part in published for part in names):
                continue
            expected = torch.cat([published[part] for part in names])
            columns = random.integers(0, expected.shape[1], NUM_PROBED_COLUMNS)
            rows = torch.eye(expected.shape[1], dtype=expected.dtype)[columns].to(self.device)
            found = module.quant_method.apply(module, rows)[:, : len(expected)].T.cpu()
            if found.shape == (len(expected), NUM_PROBED_COLUMNS):
                _compare(found, expected[:, columns], name, weights.version)
                checked += 1
        return checked


class WorkerExtension:
    """Mixed into vLLM's worker, which has the transfer engine."""

    weight_transfer_engine: StoreTransfer

    def everlong_report(self) -> dict[str, Any]:
        return self.weight_transfer_engine.report()


def _tensor_of(raw: RawTensor) -> torch.Tensor:
    bits = np.ascontiguousarray(raw.bits)
    return torch.from_numpy(bits if bits.flags.writeable else bits.copy()).view(_DTYPES[raw.dtype])


def _compare(found: torch.Tensor, expected: torch.Tensor, name: str, version: int) -> None:
    if not torch.equal(found, expected):
        raise RuntimeError(f"after loading version {version} the model computes with another {name} than was published")


WeightTransferEngineFactory.register_engine(BACKEND, StoreTransfer)
