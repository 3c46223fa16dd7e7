"""Small numbers that are not all as frequent, near their entropy: several to a byte where they fit, then Huffman coding by zstd.

A Huffman code spends a whole bit or more on each byte, far over the entropy where one number is most of them; with two or four to a
byte the loss is spread over as many.
"""

from __future__ import annotations

import numpy as np
import zstandard

# S symbols, B bytes

_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, window_log=17, hash_log=12,
    format=zstandard.FORMAT_ZSTD1_MAGICLESS, write_content_size=False, write_checksum=False,
)  # fmt: skip
"""Matches of seven bytes are those of runs; shorter ones are chance, and cost more than they save. Small groups are many, so
frames hold nothing that the reader knows."""

_PER_BYTE = (1, 2, 4)


def _unpacked(per_byte: int) -> np.ndarray:
    """[byte, place]: the symbols that a byte holds."""
    bits = 8 // per_byte
    return (np.arange(256)[:, None] >> (bits * np.arange(per_byte)) & ((1 << bits) - 1)).astype(np.uint8)


_TABLES = {per_byte: _unpacked(per_byte) for per_byte in _PER_BYTE}


def encode_symbols(symbols_S: np.ndarray) -> bytes:
    """`symbols_S`: uint8. The first byte says how many stand in one; nothing at all is no bytes."""
    if not symbols_S.size:
        return b""
    largest = int(symbols_S.max())
    packed = [_pack(symbols_S, per_byte) for per_byte in _PER_BYTE if largest < 1 << (8 // per_byte)]
    return min(packed, key=len)


def decode_symbols(payload: bytes, count: int) -> np.ndarray:
    """uint8. Raises ValueError for anything but so many symbols, before memory is taken."""
    if not count and not payload:
        return np.empty(0, np.uint8)
    table = _TABLES.get(payload[0]) if payload else None
    if table is None:
        raise ValueError(f"{count} symbols begin with how many are in a byte, one of {_PER_BYTE}, got {payload[:1]!r}")
    num_bytes = -(-count // table.shape[1])
    try:
        decompressor = zstandard.ZstdDecompressor(format=zstandard.FORMAT_ZSTD1_MAGICLESS)
        raw_B = np.frombuffer(decompressor.decompress(payload[1:], max_output_size=num_bytes), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"expected {count} symbols in a zstd frame of {num_bytes} bytes: {error}") from error
    if len(raw_B) != num_bytes:
        raise ValueError(f"{count} symbols are in {num_bytes} bytes, got {len(raw_B)}")
    return raw_B if table.shape[1] == 1 else table[raw_B].reshape(-1)[:count]


def _pack(symbols_S: np.ndarray, per_byte: int) -> bytes:
    padded_S = np.zeros(-(-symbols_S.size // per_byte) * per_byte, np.uint8)
    padded_S[: symbols_S.size] = symbols_S
    packed_B = padded_S[::per_byte].copy()
    for place in range(1, per_byte):
        packed_B |= padded_S[place::per_byte] << (8 // per_byte * place)
    compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    return bytes([per_byte]) + compressor.compress(packed_B.data)
