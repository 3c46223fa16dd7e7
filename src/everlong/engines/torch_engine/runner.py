"""Computes one step, in the engine's own thread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch

from everlong.engines.torch_engine.attention import PagedAttend
from everlong.engines.torch_engine.cache import KeyValueCache
from everlong.engines.torch_engine.loading import load_adapters, load_weight_set
from everlong.engines.torch_engine.sampler import Drawn, Draws, draw
from everlong.engines.torch_engine.scheduler import Work
from everlong.models.head import hide_padding
from everlong.models.llama.model import Llama
from everlong.models.llama.packed import PackedLlama
from everlong.models.numerics import Numerics
from everlong.weights import RawTensor, WeightSet

# T tokens of the step, N of them sample


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    drawn: Drawn | None
    """One row for each work that samples, in their order; None where none does."""
    forward_s: float
    sample_s: float


class StepRunner:
    def __init__(self, model: Llama, num_blocks: int, block_tokens: int) -> None:
        self._model, self._block_tokens = model, block_tokens
        dtype = torch.float32 if model.numerics is Numerics.ALIGNED else model.dtype
        # aligned bits are those of the model's own products
        self._packed = None if model.numerics is Numerics.ALIGNED else PackedLlama(model)
        self._cache = KeyValueCache(model.config, num_blocks, block_tokens, dtype)
        self._frozen: Mapping[str, RawTensor] | None = None
        """What the model was last loaded with; a reader hands the same on as long as it stays."""

    def load(self, weights: WeightSet) -> None:
        """Raises ValueError, before anything is changed, where they do not fit."""
        if weights.frozen and weights.frozen is self._frozen:
            load_adapters(self._model, weights)
            if self._packed is not None:
                self._packed.pack_adapters()
            return
        load_weight_set(self._model, weights)
        self._frozen = weights.frozen
        if self._packed is not None:
            self._packed.pack()

    @torch.inference_mode()
    def run(self, works: Ordered[Work], draws: Draws) -> StepResult:
        began = time.perf_counter()
        network, config = self._packed or self._model, self._model.config
        ids = np.concatenate([work.sequence.ids[work.start : work.start + work.count] for work in works])
        positions = np.concatenate([np.arange(work.start, work.start + work.count) for work in works])
        attend = PagedAttend(self._cache, works, self._block_tokens, config.head_dim**-0.5, self._model.numerics)
        hidden = network(torch.from_numpy(ids), torch.from_numpy(positions), attend)
        forward = time.perf_counter()
        ends = np.cumsum([work.count for work in works]) - 1
        rows = ends[[work.samples for work in works]]
        drawn = None
        if rows.size:
            logits = network.logits(hidden[torch.from_numpy(rows)])
            drawn = draw(hide_padding(logits, config), draws, config.vocab_size)
        return StepResult(drawn, forward - began, time.perf_counter() - forward)
