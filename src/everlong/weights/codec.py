"""Exact coding of one tensor: the full bits, or what changed against a base. Any bit pattern survives.

A delta holds, for each changed value, the gap to the one before and the distance in units in the last place. Most changes
of an optimiser step are one or two ulp, so both are one or two bytes that repeat, and compress well once their bytes are
split into planes. Values further apart, and gaps too wide, escape to their full size.
"""

from __future__ import annotations

import numpy as np
import zstandard

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
    steps_C = _ordered(after[changed_C]) - _ordered(before[changed_C])
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
    gaps_C = low_C.astype(np.int64) | high_C.astype(np.int64) << 8
    wide_C, far_C = gaps_C == WIDE_GAP, steps_C == FAR_STEP
    if wide_C.sum() != wide or far_C.sum() != far:
        raise ValueError(f"a delta's escapes do not fit: {wide} wide gaps and {far} far values were announced")
    gaps_C[wide_C] = wide_gaps.astype(np.int64)
    changed_C = np.cumsum(gaps_C + 1) - 1
    if count and not 0 <= changed_C[-1] < old.size:
        raise ValueError(f"a delta changes value {changed_C[-1]} of a tensor with {old.size} values")
    flat = old.flat().copy()
    values_C = _unordered(_ordered(flat[changed_C]) + steps_C, dtype)
    values_C[far_C] = far_values
    flat[changed_C] = values_C
    return RawTensor(old.dtype, old.shape, flat.reshape(old.shape))


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Signed: neighbouring floats get neighbouring integers, -0.0 just below 0.0; one to one on all patterns, NaN included."""
    sign = 1 << (8 * bits.itemsize - 1)
    wide = bits.astype(np.int32 if bits.itemsize == 2 else np.int64)
    return np.where(wide >= sign, 2 * sign - 1 - wide, wide + sign)


def _unordered(places: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The bits at these places, wrapping around where a damaged delta leads outside: the checksum refuses it."""
    sign = 1 << (8 * dtype.itemsize - 1)
    return np.where(places >= sign, places - sign, 2 * sign - 1 - places).astype(dtype)


def _compress(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw)


def _decompress(payload: bytes) -> bytes:
    try:
        return zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise ValueError(f"payload of {len(payload)} bytes is not a zstd frame: {error}") from error
