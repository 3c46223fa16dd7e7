"""zstd frames that say how large they are, so that a damaged one cannot take the memory."""

from __future__ import annotations

import zstandard


def compress(raw: bytes | memoryview, level: int = 3, *, checksum: bool = False) -> bytes:
    """`checksum`: where nothing else would tell damage."""
    return zstandard.ZstdCompressor(level=level, write_checksum=checksum).compress(raw)


def is_compressed(payload: bytes | memoryview) -> bool:
    return bytes(payload[:4]) == zstandard.FRAME_HEADER


def decompress(payload: bytes | memoryview, most: int) -> bytes:
    """Raises ValueError for what is no frame, and for one of more than `most` bytes."""
    try:
        if zstandard.frame_content_size(payload) > most:
            raise ValueError(f"expected at most {most} bytes, got {zstandard.frame_content_size(payload)}")
        return zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise ValueError(f"payload of {len(payload)} bytes is not a zstd frame: {error}") from error
