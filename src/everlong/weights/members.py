"""Sets of positions: how many members come before one, and where the member with so many before it is.

Of a set kept as bits both take a few operations on 64-bit words for each answer (Vigna 2008, "Broadword implementation of
rank/select queries"), so that a delta need not list all members of a group to find the few that changed.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

# N positions in all, W words of 64, M members, C positions or ranks that are asked for

_EVERY_BYTE = np.uint64(0x0101010101010101)
_HIGH_BITS = np.uint64(0x8080808080808080)
_FIVES, _THREES, _FIFTEENS = (np.uint64(0x0101010101010101 * byte) for byte in (0x55, 0x33, 0x0F))
_BYTE = np.uint64(0xFF)


def _places_in_bytes() -> np.ndarray:
    """[8 byte + k]: the place of the k-th set bit of that byte."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.argsort(1 - bits, axis=1, kind="stable").astype(np.int64).reshape(-1)


_PLACES = _places_in_bytes()


class Members(Protocol):
    @property
    def count(self) -> int: ...

    def ranks(self, positions_C: np.ndarray) -> np.ndarray:
        """For each member at such a position, how many come before it; int64."""
        ...

    def positions(self, ranks_C: np.ndarray) -> np.ndarray:
        """Where the members with so many before them are; `ranks_C`: int64 in ascending order, each below `count`."""
        ...

    def all_positions(self) -> np.ndarray:
        """Ascending, int64."""
        ...


class AllValues:
    """Every position below a number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def ranks(self, positions_C: np.ndarray) -> np.ndarray:
        return positions_C

    def positions(self, ranks_C: np.ndarray) -> np.ndarray:
        return ranks_C

    def all_positions(self) -> np.ndarray:
        return np.arange(self.count)


class Listed:
    def __init__(self, positions_M: np.ndarray) -> None:
        """Takes over the positions, which ascend."""
        self._positions_M, self.count = positions_M, positions_M.size

    def ranks(self, positions_C: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._positions_M, positions_C)

    def positions(self, ranks_C: np.ndarray) -> np.ndarray:
        return self._positions_M[ranks_C]

    def all_positions(self) -> np.ndarray:
        return self._positions_M


class Bitmap:
    """Example: Bitmap(words_of(np.array([False, True, True]))).positions(np.array([1])) is [2]: one member is before it."""

    def __init__(self, words_W: np.ndarray) -> None:
        """Takes over the words, whose lowest bit is the first position."""
        self._words_W = words_W
        counts_W = np.bitwise_count(words_W)
        self._before_W = np.cumsum(counts_W, dtype=np.int64)
        self.count = int(self._before_W[-1]) if words_W.size else 0
        self._before_W -= counts_W

    def ranks(self, positions_C: np.ndarray) -> np.ndarray:
        words_C = positions_C >> 6
        lower_C = (np.uint64(1) << (positions_C & 63).astype(np.uint64)) - np.uint64(1)
        return self._before_W[words_C] + np.bitwise_count(self._words_W[words_C] & lower_C)

    def positions(self, ranks_C: np.ndarray) -> np.ndarray:
        word_C = np.searchsorted(self._before_W, ranks_C, side="right") - 1
        bits_C = self._words_W[word_C]
        left_C = (ranks_C - self._before_W[word_C]).view(np.uint64)
        sums_C = _sums_of_bytes(bits_C)
        byte_C = np.bitwise_count((((left_C * _EVERY_BYTE) | _HIGH_BITS) - sums_C) & _HIGH_BITS)
        shift_C = byte_C.astype(np.uint64) << np.uint64(3)
        left_C -= ((sums_C << np.uint64(8)) >> shift_C) & _BYTE
        place_C = _PLACES[((((bits_C >> shift_C) & _BYTE) << np.uint64(3)) + left_C).view(np.int64)]
        return (word_C << 6) + shift_C.view(np.int64) + place_C

    def all_positions(self) -> np.ndarray:
        """Words and bytes without a member are skipped, so that few members are found faster than by looking at every bit."""
        word_B = np.flatnonzero(self._words_W != 0)
        raw_B = self._words_W[word_B].view(np.uint8)
        byte_C = np.flatnonzero(raw_B != 0)
        bit_C = np.flatnonzero(np.unpackbits(raw_B[byte_C], bitorder="little").view(bool))
        byte_C = byte_C[bit_C >> 3]
        return (word_B[byte_C >> 3] << 6) + ((byte_C & 7) << 3) + (bit_C & 7)


def words_of(members_N: np.ndarray) -> np.ndarray:
    """bool to bits."""
    packed = np.packbits(members_N, bitorder="little")
    words_W = np.zeros(-(-packed.size // 8), np.uint64)
    words_W.view(np.uint8)[: packed.size] = packed
    return words_W


def words_without(inner_W: np.ndarray, num_positions: int) -> np.ndarray:
    """The bits of all other positions."""
    words_W = ~inner_W
    if num_positions % 64:
        words_W[-1] &= (np.uint64(1) << np.uint64(num_positions % 64)) - np.uint64(1)
    return words_W


def _sums_of_bytes(bits_C: np.ndarray) -> np.ndarray:
    """In each byte, how many bits are set in it and in those below."""
    sums_C = bits_C - ((bits_C >> np.uint64(1)) & _FIVES)
    sums_C = (sums_C & _THREES) + ((sums_C >> np.uint64(2)) & _THREES)
    return ((sums_C + (sums_C >> np.uint64(4))) & _FIFTEENS) * _EVERY_BYTE
