"""Exact coding of one tensor: the full bits, or what changed against a base. Any bit pattern survives.

A delta holds, for each changed value, the gap to the one before and the distance in units in the last place. Most changes
of an optimiser step are one or two ulp, so both are one or two bytes that repeat, and compress well once their bytes are
split into planes. Values further apart, and gaps too wide, escape to their full size. Where many values
changed, a step for every value is as small and is applied faster.
"""

from __future__ import annotations

import numpy as np
import zstandard

from everlong.weights.places import distances, moved
from everlong.weights.tensors import BITS, RawTensor

# N values, C changed ones

ZSTD_LEVEL = 3

WIDE_GAP = 0xFFFF
"""A gap of this many unchanged values or more stands in its own stream as 8 bytes."""

FAR_STEP = -128
"""A change of more than 127 ulp is replaced by the new value's full bits."""

HEADER = np.dtype([("changed", "<u8"), ("wide", "<u8"), ("far", "<u8")])


def encode_full(new: RawTensor) -> bytes:
    """The whole tensor: byte planes (all lowest bytes first), then zstd."""
    raw, width = new.flat().view(np.uint8), new.bits.itemsize
    return _compress(b"".join(raw[byte::width].tobytes() for byte in range(width)))


def decode_full(payload: bytes, like_dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The bits that `encode_full` coded, of `shape`. Raises ValueError where the payload does not fit."""
    bits = BITS[like_dtype]
    raw = _decompress(payload)
    num_values = int(np.prod(shape, dtype=np.int64))
    if len(raw) != num_values * bits.itemsize:
        raise ValueError(f"{num_values} values of {like_dtype} need {num_values * bits.itemsize} bytes, got {len(raw)}")
    planes = np.frombuffer(raw, np.uint8).reshape(bits.itemsize, num_values)
    joined = np.empty(len(raw), np.uint8)
    for byte, plane in enumerate(planes):
        joined[byte :: bits.itemsize] = plane
    return joined.view(bits).reshape(shape)


def count_changed(old: RawTensor, new: RawTensor) -> int:
    """Values whose bits differ; 0.0 and -0.0 differ."""
    return int(np.count_nonzero(old.bits != new.bits))


def encode_delta(old: RawTensor, new: RawTensor) -> bytes:
    """What turns `old` into `new`, both of the same dtype and shape."""
    assert old.same_layout(new)
    before, after = old.flat(), new.flat()
    changed_C = np.flatnonzero(before != after)
    gaps_C = np.diff(changed_C, prepend=-1) - 1
    wide_C = gaps_C >= WIDE_GAP
    steps_C = distances(before[changed_C], after[changed_C])
    far_C = np.abs(steps_C) > 127
    short_gaps_C = np.where(wide_C, WIDE_GAP, gaps_C).astype("<u2")
    parts = [
        np.array([(changed_C.size, wide_C.sum(), far_C.sum())], HEADER),
        (short_gaps_C & 0xFF).astype(np.uint8),
        (short_gaps_C >> 8).astype(np.uint8),
        np.where(far_C, FAR_STEP, steps_C).astype(np.int8),
        gaps_C[wide_C].astype("<u8"),
        after[changed_C[far_C]],
    ]
    return _compress(b"".join(part.tobytes() for part in parts))


def apply_delta(old: RawTensor, payload: bytes) -> RawTensor:
    """A new tensor: `old` with the payload's changes. `old` is not touched.

    Raises ValueError for a payload that is damaged or does not fit; only the checksum tells whether `old` was the base.
    """
    raw = _decompress(payload)
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


def encode_steps(old: RawTensor, new: RawTensor) -> bytes:
    """What turns `old` into `new`, with a step for every value, 0 where nothing changed."""
    assert old.same_layout(new)
    before, after = old.flat(), new.flat()
    steps_N = distances(before, after)
    far_N = np.abs(steps_N) > 127
    return _compress(np.where(far_N, FAR_STEP, steps_N).astype(np.int8).tobytes() + after[far_N].tobytes())


def apply_steps(old: RawTensor, payload: bytes) -> RawTensor:
    """As `apply_delta`, for a payload of `encode_steps`."""
    raw = _decompress(payload)
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


def _compress(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw)


def _decompress(payload: bytes) -> bytes:
    try:
        return zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise ValueError(f"payload of {len(payload)} bytes is not a zstd frame: {error}") from error
