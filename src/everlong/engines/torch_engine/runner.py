"""Computes one step, in the engine's own thread."""

from __future__ import annotations

import time
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch

from everlong.engines.torch_engine.attention import PagedAttend
from everlong.engines.torch_engine.cache import KeyValueCache
from everlong.engines.torch_engine.sampler import Drawn, Draws, draw
from everlong.engines.torch_engine.scheduler import Work
from everlong.models.head import logits_of
from everlong.models.llama.model import Llama
from everlong.models.numerics import Numerics

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
        self._cache = KeyValueCache(model.config, num_blocks, block_tokens, dtype)

    @torch.inference_mode()
    def run(self, works: Ordered[Work], draws: Draws) -> StepResult:
        began = time.perf_counter()
        model, config = self._model, self._model.config
        ids = np.concatenate([work.sequence.ids[work.start : work.start + work.count] for work in works])
        positions = np.concatenate([np.arange(work.start, work.start + work.count) for work in works])
        attend = PagedAttend(self._cache, works, self._block_tokens, config.head_dim**-0.5, model.numerics)
        hidden = model(torch.from_numpy(ids), torch.from_numpy(positions), attend)
        forward = time.perf_counter()
        ends = np.cumsum([work.count for work in works]) - 1
        rows = ends[[work.samples for work in works]]
        drawn = None
        if rows.size:
            logits = logits_of(hidden[torch.from_numpy(rows)], model.head_weight, config, model.numerics)
            drawn = draw(logits, draws, config.vocab_size)
        return StepResult(drawn, forward - began, time.perf_counter() - forward)
