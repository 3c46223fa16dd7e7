"""Ascending numbers, such as the positions of changed values, in little more than their entropy: Golomb-Rice coded gaps.

The gap before a number (how many were left out) is cut into low bits, kept as they are, and the rest in unary. Where each number
is there with the same chance, gaps are geometric and the best cut costs about 0.05 bits a number over the entropy (Gallager and
Van Voorhis 1975), whatever that chance is and without a table. All of it is shifts and sums over whole arrays.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

# C numbers

MAX_LOW_BITS = 31
"""Keeps every sum below 2**63 in a record of any content."""


class Ascending(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Example: Ascending(count=2, low_bits=1, high=b"\\xa0", low=b"\\x40") holds 0 and 4: gaps 0 and 3, that is 0|0 and 1|1."""

    count: int
    low_bits: int
    high: bytes
    """For each number so many zeros as its gap holds whole `2**low_bits`, then a one; the first in the highest bit."""
    low: bytes
    """Plane by plane, the lowest first: that bit of every gap, each plane filled up to a whole byte."""


EMPTY = Ascending(0, 0, b"", b"")


def encode_ascending(numbers_C: np.ndarray) -> Ascending:
    """`numbers_C`: int64, strictly ascending from 0."""
    if not numbers_C.size:
        return EMPTY
    gaps_C = np.diff(numbers_C, prepend=-1) - 1
    low_bits = _best_low_bits(gaps_C)
    ends_C = np.cumsum(gaps_C >> low_bits) + np.arange(gaps_C.size)
    high = np.zeros(int(ends_C[-1]) + 1, np.uint8)
    high[ends_C] = 1
    planes = []
    for first in range(0, low_bits, 8):
        byte_C = (gaps_C >> first).astype(np.uint8)
        planes += [np.packbits(byte_C & (1 << bit)) for bit in range(min(8, low_bits - first))]
    return Ascending(gaps_C.size, low_bits, np.packbits(high).tobytes(), b"".join(plane.tobytes() for plane in planes))


def decode_ascending(record: Ascending, below: int) -> np.ndarray:
    """The numbers, int64. Raises ValueError for a record that is damaged or holds one that is not less than `below`."""
    count, low_bits = record.count, record.low_bits
    row_bytes = (count + 7) // 8
    if not 0 <= count <= below or not 0 <= low_bits <= MAX_LOW_BITS or len(record.low) != low_bits * row_bytes:
        raise ValueError(
            f"{count} numbers below {below} with {low_bits} low bits each need {low_bits * row_bytes} bytes for them, "
            f"got {len(record.low)}"
        )
    ends_C = np.flatnonzero(np.unpackbits(np.frombuffer(record.high, np.uint8)).view(bool))
    if len(ends_C) != count:
        raise ValueError(f"{count} numbers were announced, there are {len(ends_C)}")
    if not count:
        return ends_C
    order_C = np.arange(count)
    numbers_C = ((ends_C - order_C) << low_bits) + order_C
    if low_bits:
        numbers_C += np.cumsum(_join(record.low, low_bits, count), dtype=np.int64)
    if numbers_C[-1] >= below:
        raise ValueError(f"expected numbers below {below}, got {numbers_C[-1]}")
    return numbers_C


def _best_low_bits(gaps_C: np.ndarray) -> int:
    """Near the logarithm of ln 2 times the mean distance, which is the best for a geometric distribution."""
    distance = 1 + float(gaps_C.mean())
    near = max(0, math.floor(math.log2(max(1.0, math.log(2) * distance))))
    return min((near, near + 1), key=lambda bits: gaps_C.size * bits + int((gaps_C >> bits).sum()))


def _join(low: bytes, low_bits: int, count: int) -> np.ndarray:
    planes = np.unpackbits(np.frombuffer(low, np.uint8)).reshape(low_bits, -1)[:, :count]
    width = np.uint8 if low_bits <= 8 else np.uint16 if low_bits <= 16 else np.uint32
    joined_C = planes[0].astype(width)
    for bit in range(1, low_bits):
        joined_C |= planes[bit].astype(width) << width(bit)
    return joined_C
