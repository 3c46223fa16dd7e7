"""Attention of the trainer over packed trees: a token sees itself and what stands before it on the path to its root.

Segments of one micro-batch are padded together and attend in one call: their queries over the keys gathered along
their path, so that a key stands at its absolute position, as it does in an engine's cache. In aligned numerics the bits
therefore equal the engine's; the fast mode uses the same gather because a mask over all T tokens costs T squared.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from everlong.models.attention_logits import highest_logits
from everlong.models.numerics import CausalAttention, Numerics

# T tokens, B segments, Q queries of the longest segment, S keys of the longest path


class TreeAttention:
    """An `Attend` over segments (parent index or -1, start, length) that tile the T tokens, parents first."""

    def __init__(self, segments: Sequence[tuple[int, int, int]], scale: float, numerics: Numerics) -> None:
        self._segments, self._scale = segments, scale
        buckets = (_bucket([segments[i] for i in members], segments) for members in _by_length(segments))
        self._buckets = [
            (queries, keys, CausalAttention(positions, scale, numerics), real)
            for queries, keys, positions, real in buckets
        ]

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        out = torch.zeros_like(q_THD)
        for queries_BQ, keys_BS, attention, real_BQ in self._buckets:
            mixed = attention(_take(q_THD, queries_BQ), _take(k_TGD, keys_BS), _take(v_TGD, keys_BS))
            out = out.index_put((queries_BQ[real_BQ],), mixed[real_BQ].to(out.dtype))
        return out

    def highest_logits(self, q_THD: Tensor, k_TGD: Tensor) -> Tensor:
        """float32 [H], over all pairs of query and key that see each other."""
        pairs = ((torch.from_numpy(path), length) for path, length in self._paths)
        found = [highest_logits(q_THD[path[-length:]], k_TGD[path], self._scale) for path, length in pairs]
        return torch.stack(found).amax(0)

    @cached_property
    def _paths(self) -> list[tuple[np.ndarray, int]]:
        """Of every segment with tokens: its path's, and how many are its own."""
        return [(_path(segment, self._segments), segment[2]) for segment in self._segments if segment[2]]


def _take(x: Tensor, places: Tensor) -> Tensor:
    """x[places] whose gradient is summed in one order: that of an index adds atomically once threads share the work."""
    return F.embedding(places, x.flatten(1)).unflatten(-1, x.shape[1:])


def _by_length(segments: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """Segments whose lengths differ by less than two share a call, so that padding at most doubles the work."""
    buckets: dict[int, list[int]] = {}
    for index, (_, _, length) in enumerate(segments):
        if length:
            buckets.setdefault(max(16, length).bit_length(), []).append(index)
    return [buckets[size] for size in sorted(buckets)]


def _bucket(
    members: Sequence[tuple[int, int, int]], segments: Sequence[tuple[int, int, int]]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    paths = [_path(segment, segments) for segment in members]
    lengths = np.array([length for _, _, length in members])
    keys = np.zeros((len(members), max(len(path) for path in paths)), np.int64)
    for row, path in zip(keys, paths, strict=True):
        row[: len(path)] = path
    places = np.arange(lengths.max())[None]
    real = places < lengths[:, None]
    first = np.array([len(path) for path in paths]) - lengths
    starts = np.array([start for _, start, _ in members])
    # a padded query repeats the segment's last one, so it sees at least one key; its result is dropped
    places = np.minimum(places, lengths[:, None] - 1)
    tensors = (starts[:, None] + places, keys, first[:, None] + places, real)
    return tuple(torch.from_numpy(np.ascontiguousarray(t)) for t in tensors)  # ty: ignore[invalid-explicit-return]


def _path(segment: tuple[int, int, int], segments: Sequence[tuple[int, int, int]]) -> np.ndarray:
    """Indices of the tokens from the root to the segment's end."""
    parts = []
    while True:
        parent, start, length = segment
        parts.append(np.arange(start, start + length))
        if parent < 0:
            return np.concatenate(parts[::-1])
        segment = segments[parent]
