"""Deltas in stores of format 1, which are read and no longer written: gaps and steps, or a step for every value, through zstd."""

from __future__ import annotations

import numpy as np

from everlong.weights.places import moved
from everlong.weights.tensors import RawTensor
from everlong.weights.zstd import decompress

# N values, C changed ones

WIDE_GAP = 0xFFFF
"""A gap of this many unchanged values or more stands in its own stream as 8 bytes."""

FAR_STEP = -128
"""A change of more than 127 ulp is replaced by the new value's full bits."""

HEADER = np.dtype([("changed", "<u8"), ("wide", "<u8"), ("far", "<u8")])


def apply_delta(old: RawTensor, payload: bytes | memoryview) -> RawTensor:
    """A new tensor: `old` with the payload's changes. `old` is not touched.

    Raises ValueError for a payload that is damaged or does not fit; only the checksum tells whether `old` was the base.
    """
    raw = decompress(payload, HEADER.itemsize + old.size * (11 + old.bits.itemsize))
    dtype = old.bits.dtype
    if len(raw) < HEADER.itemsize:
        raise ValueError(f"a delta has a header of {HEADER.itemsize} bytes, got {len(raw)} bytes in all")
    count, wide, far = (int(n) for n in np.frombuffer(raw, HEADER, 1)[0])
    sizes = [count, count, count, 8 * wide, dtype.itemsize * far]
    if len(raw) != HEADER.itemsize + sum(sizes):
        raise ValueError(f"a delta of {count} changes needs {HEADER.itemsize + sum(sizes)} bytes, got {len(raw)}")
    starts = np.cumsum([HEADER.itemsize, *sizes])
    low_C, high_C, steps_C, wide_gaps, far_values = (
        np.frombuffer(raw, kind, stop, start)
        for kind, stop, start in zip(
            (np.uint8, np.uint8, np.int8, "<u8", dtype), (count, count, count, wide, far), starts[:-1], strict=True
        )
    )
    short_gaps_C = low_C.astype("<u2") | high_C.astype("<u2") << 8
    wide_C, far_C = np.flatnonzero(short_gaps_C == WIDE_GAP), np.flatnonzero(steps_C == FAR_STEP)
    if len(wide_C) != wide or len(far_C) != far:
        raise ValueError(f"a delta's escapes do not fit: {wide} wide gaps and {far} far values were announced")
    changed_C = short_gaps_C.astype(np.int64)
    changed_C[wide_C] = wide_gaps.astype(np.int64)
    changed_C += 1
    np.cumsum(changed_C, out=changed_C)
    changed_C -= 1
    if count and not 0 <= changed_C[-1] < old.size:
        raise ValueError(f"a delta changes value {changed_C[-1]} of a tensor with {old.size} values")
    flat = old.flat().copy()
    values_C = moved(flat[changed_C], steps_C)
    values_C[far_C] = far_values
    flat[changed_C] = values_C
    return RawTensor(old.dtype, old.shape, flat.reshape(old.shape))


def apply_steps(old: RawTensor, payload: bytes | memoryview) -> RawTensor:
    """As `apply_delta`, for a step for every value, 0 where nothing changed."""
    raw = decompress(payload, old.size * (1 + old.bits.itemsize))
    if len(raw) < old.size:
        raise ValueError(f"a step for each of {old.size} values needs as many bytes, got {len(raw)}")
    steps_N = np.frombuffer(raw, np.int8, old.size)
    far = np.flatnonzero(steps_N == FAR_STEP)
    dtype = old.bits.dtype
    if len(raw) != old.size + dtype.itemsize * len(far):
        raise ValueError(f"{len(far)} far values need {dtype.itemsize * len(far)} bytes, got {len(raw) - old.size}")
    flat = moved(old.flat(), steps_N)
    flat[far] = np.frombuffer(raw, dtype, len(far), old.size)
    return RawTensor(old.dtype, old.shape, flat.reshape(old.shape))
