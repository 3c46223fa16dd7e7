"""Attention of one step over the paged cache: prompt chunks and decoding sequences side by side.

Sequences of similar size share a call, padded to the longest. Keys stand at their absolute positions, as in the trainer's
`TreeAttention`, so in aligned numerics the bits are the same however a sequence was cut into steps.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everlong.engines.torch_engine.cache import KeyValueCache
from everlong.engines.torch_engine.scheduler import Sequence, Work
from everlong.models.numerics import CausalAttention, Numerics

# T tokens of the step, B sequences of a call, Q queries of the longest, N blocks of the longest


@dataclass(frozen=True, slots=True)
class _Call:
    """Sequences that attend together."""

    queries_BQ: Tensor
    """Indices into the step's tokens; behind a sequence's last query that one is repeated."""
    real_BQ: Tensor
    blocks_BN: Tensor
    attention: CausalAttention
    is_whole_step: bool
    """The step's tokens are these queries, one after another."""


class PagedAttend:
    """An `Attend` for the works of one step, whose tokens stand in that order in the flat batch."""

    def __init__(
        self, cache: KeyValueCache, works: Ordered[Work], block_tokens: int, scale: float, numerics: Numerics
    ) -> None:
        self._cache = cache
        counts = np.array([work.count for work in works])
        starts = np.array([work.start for work in works])
        firsts = np.cumsum(counts) - counts
        self._slots = torch.from_numpy(slots_of_step(works, block_tokens))
        self._calls = []
        for members in _similar(starts + counts, counts):
            queries, real, positions, blocks = _call(
                [works[i] for i in members], firsts[members], starts[members], counts[members], block_tokens
            )
            is_whole_step = len(members) == len(works) and bool(real.all())
            attention = CausalAttention(positions, scale, numerics)
            self._calls.append(_Call(queries, real, blocks, attention, is_whole_step))

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        self._cache.write(layer, self._slots, k_TGD, v_TGD)
        if len(self._calls) == 1 and self._calls[0].is_whole_step:
            call = self._calls[0]
            q_BQHD = q_THD.view(*call.queries_BQ.shape, *q_THD.shape[1:])
            return call.attention(q_BQHD, *self._cache.read(layer, call.blocks_BN)).flatten(0, 1).to(q_THD.dtype)
        out = torch.empty_like(q_THD)
        for call in self._calls:
            mixed = call.attention(q_THD[call.queries_BQ], *self._cache.read(layer, call.blocks_BN))
            out[call.queries_BQ[call.real_BQ]] = mixed[call.real_BQ].to(out.dtype)
        return out


def slots_of_step(works: Ordered[Work], block_tokens: int) -> np.ndarray:
    """Where each of the step's tokens stands in the cache."""
    ends = ((work.sequence, work.start, work.start + work.count) for work in works)
    return np.concatenate([slots_of(sequence, start, end, block_tokens) for sequence, start, end in ends])


def slots_of(sequence: Sequence, start: int, end: int, block_tokens: int) -> np.ndarray:
    """Of a sequence's tokens from position `start` to `end`."""
    positions = np.arange(start, end)
    blocks = np.array(sequence.blocks)[positions // block_tokens]
    return blocks * block_tokens + positions % block_tokens


def _similar(lengths: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
    """Works that share a call: padding at most doubles queries and keys, except where both are few and a call costs more."""
    queries = [0 if count == 1 else max(16, count).bit_length() for count in counts.tolist()]
    sizes = [max(255, length).bit_length() for length in lengths.tolist()]
    groups: dict[tuple[int, int], list[int]] = {}
    for index, group in enumerate(zip(queries, sizes, strict=True)):
        groups.setdefault(group, []).append(index)
    return [np.array(members) for members in groups.values()]


def _call(
    works: Ordered[Work], firsts: np.ndarray, starts: np.ndarray, counts: np.ndarray, block_tokens: int
) -> list[Tensor]:
    """Queries, which of them are real, their positions, and blocks."""
    places = np.arange(counts.max())[None]
    real = places < counts[:, None]
    places = np.minimum(places, counts[:, None] - 1)
    num_blocks = -(-(starts + counts) // block_tokens)
    blocks = np.zeros((len(works), num_blocks.max()), np.int64)
    for row, work, count in zip(blocks, works, num_blocks.tolist(), strict=True):
        row[:count] = work.sequence.blocks[:count]
    return [torch.from_numpy(t) for t in (firsts[:, None] + places, real, starts[:, None] + places, blocks)]
