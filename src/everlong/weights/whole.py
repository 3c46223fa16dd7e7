"""A tensor whole: byte planes, all lowest bytes first, through zstd. Any bit pattern survives."""

from __future__ import annotations

import math

import numpy as np

from everlong.weights.tensors import BITS, RawTensor
from everlong.weights.zstd import compress, decompress


def encode_full(new: RawTensor) -> bytes:
    raw, width = new.flat().view(np.uint8), new.bits.itemsize
    return compress(b"".join(raw[byte::width].tobytes() for byte in range(width)))


def decode_full(payload: bytes | memoryview, like_dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The bits that `encode_full` coded, of `shape`. Raises ValueError where the payload does not fit."""
    bits, num_values = BITS[like_dtype], math.prod(shape)
    raw = decompress(payload, num_values * bits.itemsize)
    if len(raw) != num_values * bits.itemsize:
        raise ValueError(f"{num_values} values of {like_dtype} need {num_values * bits.itemsize} bytes, got {len(raw)}")
    planes = np.frombuffer(raw, np.uint8).reshape(bits.itemsize, num_values)
    joined = np.empty(len(raw), np.uint8)
    for byte, plane in enumerate(planes):
        joined[byte :: bits.itemsize] = plane
    return joined.view(bits).reshape(shape)
