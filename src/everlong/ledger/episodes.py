"""Whole episodes in the object store, named by the ledger with their hash."""

from __future__ import annotations

from typing import NamedTuple

import xxhash
import zstandard

from everlong.contracts.errors import AlreadyExists, LedgerError, NotFound
from everlong.contracts.ports import ObjectStore
from everlong.contracts.records import Episode, decode_record, encode_record

ZSTD_LEVEL = 3


class StoredEpisode(NamedTuple):
    key: str
    hash: str
    """xxh3-128 of the encoded record, before compression."""


class EpisodeStore:
    """Put first, then the `EpisodeFinished` fact with key and hash: what the ledger names can be read."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def put(self, episode: Episode, incarnation: int) -> StoredEpisode:
        """Store the episode; doing it again is no change. Raises LedgerError where another one lies under its key."""
        if incarnation != episode.order.incarnation:
            raise LedgerError(
                f"{episode.id} was ordered as incarnation {episode.order.incarnation}, stored as {incarnation}"
            )
        raw = encode_record(episode)
        key = f"episodes/{episode.id}/{incarnation:03d}"
        stored = StoredEpisode(key, _hash(raw))
        try:
            self._store.create(key, zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw))
        except AlreadyExists:
            self._read(key, stored.hash)
        return stored

    def get(self, key: str, hash: str) -> Episode:
        """Raises LedgerError for an episode that is lost, damaged or not the one that the ledger names."""
        return decode_record(self._read(key, hash), Episode)

    def _read(self, key: str, hash: str) -> bytes:
        try:
            raw = zstandard.ZstdDecompressor().decompress(self._store.get(key))
        except NotFound as error:
            raise LedgerError(f"the ledger names episode {key}, the store has none: restore it") from error
        except zstandard.ZstdError as error:
            raise LedgerError(f"stored episode {key} is damaged: {error}") from error
        if _hash(raw) != hash:
            raise LedgerError(f"stored episode {key} has hash {_hash(raw)}, expected {hash}: it is another or damaged")
        return raw


def _hash(raw: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(raw)
