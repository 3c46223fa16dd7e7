"""Old versions leave the store without stranding whoever reads.

What stays: the newest versions, those that somebody needs (a checkpoint from which a run may go on), and every version below them
down to its anchor. Of the others first the manifest goes, newest first, so that whatever is listed can be read whole. What it named
is written down as retired before, and its shards go only when versions are retired the next time: whoever began to read
has had the time until another version came, and what was killed half-way is finished then.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from everlong.contracts.errors import NotFound
from everlong.contracts.ports import ObjectStore
from everlong.weights.manifest import (
    RETIRED,
    Manifest,
    Shard,
    load_manifest,
    published_versions,
    retired_key,
    version_key,
)


def retire(store: ObjectStore, keep: int, newest: int, needed: Collection[int]) -> None:
    """Keep the `keep` newest versions up to `newest`, all after it, and the `needed` ones. Raises StoreError."""
    manifests = {version: load_manifest(store, version) for version in published_versions(store)}
    present = {version: manifest for version, manifest in manifests.items() if manifest is not None}
    staying = _with_bases(present, _roots(present, keep, newest, needed))
    _finish_earlier(store, {shard for manifest in present.values() for shard in manifest.shards})
    for version in sorted(present.keys() - staying, reverse=True):
        store.put(retired_key(version), msgspec.json.encode(present[version].shards))
        store.delete(version_key(version))


def _roots(present: Collection[int], keep: int, newest: int, needed: Collection[int]) -> set[int]:
    """A run that goes on from an older checkpoint publishes below versions of before, which therefore stay."""
    kept = sorted(version for version in present if version <= newest)[-keep:]
    return {version for version in present if version > newest or version in needed} | set(kept)


def _with_bases(present: dict[int, Manifest], roots: set[int]) -> set[int]:
    staying: set[int] = set()
    for root in roots:
        version: int | None = root
        while version is not None and version in present and version not in staying:
            staying.add(version)
            version = present[version].base_version
    return staying


def _finish_earlier(store: ObjectStore, needed: set[Shard]) -> None:
    """Delete the shards of versions that were retired before, and then what said so."""
    kept = {shard.key for shard in needed}
    for key in store.list(RETIRED):
        try:
            shards = msgspec.json.decode(store.get(key), type=tuple[Shard, ...])
        except NotFound:  # another writer has finished it
            continue
        for shard in shards:
            if shard.key not in kept:
                store.delete(shard.key)
        store.delete(key)
