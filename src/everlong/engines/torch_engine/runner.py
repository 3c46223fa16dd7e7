"""Computes one step, in the engine's own thread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch

from everlong.contracts.decisions import Decisions
from everlong.engines.torch_engine.attention import PagedAttend, slots_of, slots_of_step
from everlong.engines.torch_engine.cache import KeyValueCache
from everlong.engines.torch_engine.decided import DecidedCache
from everlong.engines.torch_engine.loading import load_adapters, load_weight_set
from everlong.engines.torch_engine.sampler import Drawn, Draws, draw
from everlong.engines.torch_engine.scheduler import Work
from everlong.models.decisions import Recorder
from everlong.models.head import hide_padding
from everlong.models.llama.model import Llama
from everlong.models.networks import packed_network
from everlong.models.numerics import Numerics
from everlong.weights import RawTensor, WeightSet

# T tokens of the step, N of them sample


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    drawn: Drawn | None
    """One row for each work that samples, in their order; None where none does."""
    decided: tuple[Decisions | None, ...]
    """For each of these what the network decided for the tokens that were asked for; None where none were."""
    forward_s: float
    sample_s: float


class StepRunner:
    def __init__(self, model: Llama, num_blocks: int, block_tokens: int) -> None:
        self._model, self._block_tokens = model, block_tokens
        dtype = torch.float32 if model.numerics is Numerics.ALIGNED else model.dtype
        # aligned bits are those of the model's own products
        self._packed = None if model.numerics is Numerics.ALIGNED else packed_network(model)
        self._cache = KeyValueCache(model.config, num_blocks, block_tokens, dtype)
        shapes = model.config.decisions
        self._decided = DecidedCache(shapes, num_blocks * block_tokens) if shapes else None
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
    def run(self, works: Ordered[Work], draws: Draws, wanted: Ordered[int | None]) -> StepResult:
        """`wanted`: for each work that samples the first position whose decisions are wanted, up to its last; or None."""
        began = time.perf_counter()
        network, config = self._packed or self._model, self._model.config
        ids = np.concatenate([work.sequence.ids[work.start : work.start + work.count] for work in works])
        positions = np.concatenate([np.arange(work.start, work.start + work.count) for work in works])
        attend = PagedAttend(self._cache, works, self._block_tokens, config.head_dim**-0.5, self._model.numerics)
        if self._decided is None:
            hidden = network(torch.from_numpy(ids), torch.from_numpy(positions), attend)
        else:
            recorder = Recorder()
            hidden = network(torch.from_numpy(ids), torch.from_numpy(positions), attend, recorder)
            self._decided.write(slots_of_step(works, self._block_tokens), recorder.rows())
        forward = time.perf_counter()
        ends = np.cumsum([work.count for work in works]) - 1
        rows = ends[[work.samples for work in works]]
        drawn = None
        if rows.size:
            logits = network.logits(hidden[torch.from_numpy(rows)])
            drawn = draw(hide_padding(logits, config), draws, config.vocab_size)
        decided = tuple(
            self._decided_of(work, first)
            for work, first in zip((work for work in works if work.samples), wanted, strict=True)
        )
        return StepResult(drawn, decided, forward - began, time.perf_counter() - forward)

    def _decided_of(self, work: Work, first: int | None) -> Decisions | None:
        if first is None or self._decided is None:
            return None
        return self._decided.read(slots_of(work.sequence, first, len(work.sequence.ids), self._block_tokens))
