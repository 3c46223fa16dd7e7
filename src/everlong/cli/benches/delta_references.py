"""What a delta's size is measured against, tensor by tensor."""

from __future__ import annotations

import numpy as np
import zstandard

from everlong.weights import RawTensor
from everlong.weights.places import distances

# N values, C changed ones


def xor_zstd(old: RawTensor, new: RawTensor) -> bytes:
    """Which bits differ, for every value, through zstd."""
    return zstandard.ZstdCompressor(level=3).compress((old.flat() ^ new.flat()).data)


def index_value(old: RawTensor, new: RawTensor) -> bytes:
    """A 4-byte index and the new value for each change, through zstd."""
    changed_C = np.flatnonzero(old.flat() != new.flat())
    return zstandard.ZstdCompressor(level=3).compress(
        changed_C.astype("<u4").tobytes() + new.flat()[changed_C].tobytes()
    )


def entropy_bound(old: RawTensor, new: RawTensor) -> float:
    """Bits that positions and differences need, as independent draws that know the tensor's own statistics for each old exponent."""
    before_N, after_N = old.flat(), new.flat()
    exponents_N = ((before_N << 1) >> (8 * before_N.itemsize - 8)).astype(np.intp)
    changed_C = np.flatnonzero(before_N != after_N)
    values_X = np.bincount(exponents_N, minlength=256)
    changed_X = np.bincount(exponents_N[changed_C], minlength=256)
    positions = _times_log(values_X) - _times_log(changed_X) - _times_log(values_X - changed_X)
    steps_C = distances(before_N[changed_C], after_N[changed_C]).astype(np.int64)
    pairs_C = np.stack([exponents_N[changed_C], steps_C], axis=1)
    occurrences = np.unique(pairs_C, axis=0, return_counts=True)[1]
    return positions + _times_log(changed_X) - _times_log(occurrences)


def _times_log(counts: np.ndarray) -> float:
    """Sum of n log2 n."""
    return float((counts * np.log2(np.maximum(counts, 1))).sum())
