"""Bytes that do not repeat each other but are not all as frequent: zstd, made to do little more than Huffman coding."""

from __future__ import annotations

import zstandard

_PARAMETERS = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, window_log=17, hash_log=12, write_checksum=False
)
"""Matches of seven bytes are those of runs; shorter ones are chance, and cost more than they save."""


def compress_symbols(raw: bytes) -> bytes:
    return zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(raw)


def decompress_symbols(payload: bytes, size_bytes: int) -> bytes:
    """Exactly so many bytes, none of them without a payload. Raises ValueError for anything else, before memory is taken."""
    if not size_bytes and not payload:
        return b""
    try:
        if zstandard.frame_content_size(payload) != size_bytes:
            raise ValueError(f"expected a frame of {size_bytes} bytes, got one of {zstandard.frame_content_size(payload)}")
        return zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise ValueError(f"payload of {len(payload)} bytes is not a zstd frame: {error}") from error
