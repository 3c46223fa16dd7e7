"""Puts versions into the object store: shards first, the manifest last."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import blake3
import msgspec

from everlong.contracts.errors import AlreadyExists
from everlong.contracts.ports import ObjectStore
from everlong.contracts.records import PublishedVersion
from everlong.weights.choice import encode_tensor
from everlong.weights.in_order import in_order, threads_for
from everlong.weights.manifest import (
    FROZEN,
    FrozenManifest,
    Manifest,
    Shard,
    TensorEntry,
    encode_manifest,
    frozen_key,
    load_manifest,
    version_key,
)
from everlong.weights.retention import retire
from everlong.weights.tensors import RawTensor, WeightSet, checksums_of, fingerprint, fingerprint_of

SHARD_BYTES = 64 << 20
"""A shard closes once it holds this much: large enough for throughput, small enough to fetch many in parallel."""


class WeightPublisher:
    def __init__(self, store: ObjectStore, anchor_every: int, keep: int | None = None) -> None:
        """`anchor_every`: versions from one anchor to the next; 1 publishes every version whole. `keep`: how many of the newest
        versions `retire` leaves; None leaves all."""
        if anchor_every < 1:
            raise ValueError(f"anchor_every counts versions and is at least 1, got {anchor_every}")
        if keep is not None and keep < 2:
            raise ValueError(
                f"keep counts versions and is at least 2, since engines read one while the next comes, got {keep}"
            )
        self._store, self._anchor_every, self._keep = store, anchor_every, keep

    def publish(self, weights: WeightSet, base: WeightSet | None) -> PublishedVersion:
        """Publish `weights` as a delta against `base`, or as an anchor: without base, or when one is due. What is frozen goes
        into the store once, before the first version that stands on it, and into no version. Beside the weights the memory
        holds a shard and a few coded tensors.

        Publishing the same version with the same bits again returns the first. Raises ValueError for a NaN, a base that
        is not published or was changed since; AlreadyExists when the version is taken by other weights; StoreError.
        """
        _refuse_nan(weights)
        checksums = checksums_of({**weights.frozen, **weights.tensors})
        taken = load_manifest(self._store, weights.version)
        if taken is not None:
            return _same_or_refuse(taken, fingerprint_of(checksums))
        frozen = self._keep_frozen(weights, checksums) if weights.frozen else None
        return self._commit(self._encode(weights, base, checksums, frozen))

    def retire(self, newest: int, needed: Callable[[], Collection[int]] = tuple) -> None:
        """Give up the versions that are more than `keep` behind `newest` and not `needed`, as `retention` says. Raises StoreError."""
        if self._keep is not None:
            retire(self._store, self._keep, newest, needed())

    def _keep_frozen(self, weights: WeightSet, checksums: dict[str, str]) -> str:
        """Put them into the store where they are not yet; their fingerprint."""
        frozen = fingerprint_of({name: checksums[name] for name in weights.frozen})
        if frozen_key(frozen) in self._store.list(FROZEN):
            return frozen
        shards, entries = self._put_tensors(weights.frozen, None, True, checksums)
        manifest = FrozenManifest(fingerprint=frozen, shards=shards, tensors=entries)
        self._store.put(frozen_key(frozen), msgspec.json.encode(manifest))
        return frozen

    def _encode(
        self, weights: WeightSet, base: WeightSet | None, checksums: dict[str, str], frozen: str | None
    ) -> Manifest:
        """Puts the shards."""
        num_deltas = 0 if base is None else self._deltas_since_anchor(weights.version, base)
        anchor = base is None or num_deltas >= self._anchor_every
        shards, entries = self._put_tensors(weights.tensors, base, anchor, checksums)
        return Manifest(
            version=weights.version,
            base_version=None if anchor or base is None else base.version,
            num_deltas=0 if anchor else num_deltas,
            fingerprint=fingerprint_of(checksums),
            num_values=weights.num_values,
            num_changed=sum(entry.num_changed for entry in entries),
            shards=shards,
            tensors=entries,
            frozen=frozen,
        )

    def _put_tensors(
        self, tensors: Mapping[str, RawTensor], base: WeightSet | None, anchor: bool, checksums: dict[str, str]
    ) -> tuple[tuple[Shard, ...], tuple[TensorEntry, ...]]:
        """Each shard goes to the store as soon as it is full, and is forgotten."""

        def encode(name: str) -> tuple[TensorEntry, bytes]:
            old = None if base is None else base.tensors.get(name)
            return encode_tensor(name, tensors[name], old, anchor, checksums[name])

        shards = _Shards(self._store)
        num_threads = threads_for(sum(tensor.size for tensor in tensors.values()))
        entries = [shards.add(*coded) for coded in in_order(encode, sorted(tensors), num_threads)]
        return shards.close(), tuple(entries)

    def _deltas_since_anchor(self, version: int, base: WeightSet) -> int:
        if base.version >= version:
            raise ValueError(f"version {version} needs an older base, got version {base.version}")
        manifest = load_manifest(self._store, base.version)
        if manifest is None:
            raise ValueError(
                f"delta {version} needs base {base.version}, which is not published: publish {base.version} first, "
                f"or publish {version} without base"
            )
        if manifest.fingerprint != fingerprint(base):
            raise ValueError(
                f"base {base.version} is not what was published under that version: its bits were written to since "
                f"(hand over copies of live parameters), or another run published it"
            )
        return manifest.num_deltas + 1

    def _commit(self, manifest: Manifest) -> PublishedVersion:
        try:
            self._store.create(version_key(manifest.version), encode_manifest(manifest))
        except AlreadyExists:
            taken = load_manifest(self._store, manifest.version)
            if taken is None:
                raise
            return _same_or_refuse(taken, manifest.fingerprint)
        return manifest.published


@dataclass(slots=True)
class _Shards:
    """Payloads back to back, cut into objects."""

    store: ObjectStore
    put: list[Shard] = field(default_factory=list)
    filling: bytearray = field(default_factory=bytearray)

    def add(self, entry: TensorEntry, payload: bytes) -> TensorEntry:
        """The entry with the place of its payload."""
        if not payload:
            return entry
        if len(self.filling) >= SHARD_BYTES:
            self._put()
        placed = msgspec.structs.replace(entry, shard=len(self.put), offset=len(self.filling), size_bytes=len(payload))
        self.filling += payload
        return placed

    def close(self) -> tuple[Shard, ...]:
        if self.filling:
            self._put()
        return tuple(self.put)

    def _put(self) -> None:
        data = bytes(self.filling)
        shard = Shard(hash=blake3.blake3(data).hexdigest(), size_bytes=len(data))
        self.store.put(shard.key, data)
        self.put.append(shard)
        self.filling = bytearray()


def _refuse_nan(weights: WeightSet) -> None:
    for name, tensor in {**weights.frozen, **weights.tensors}.items():
        if tensor.has_nan():
            raise ValueError(
                f"tensor {name} of version {weights.version} holds a NaN: training has diverged, not published"
            )


def _same_or_refuse(taken: Manifest, fingerprint: str) -> PublishedVersion:
    if taken.fingerprint == fingerprint:
        return taken.published
    raise AlreadyExists(
        f"version {taken.version} is published with fingerprint {taken.fingerprint}, these weights have {fingerprint}: "
        f"another run writes to this store, or training went on from an older checkpoint and came out different; "
        f"give the run its own store, or go on with the CPU and the number of threads that it was published with"
    )
