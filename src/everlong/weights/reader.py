"""Takes versions out of the object store: the shortest chain of manifests, applied and verified one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

import blake3

from everlong.contracts.errors import NotFound, StaleWeights, StoreError
from everlong.contracts.ports import ObjectStore
from everlong.contracts.records import PublishedVersion
from everlong.weights.first_format import apply_delta, apply_steps
from everlong.weights.in_order import in_order, threads_for
from everlong.weights.manifest import (
    Codec,
    Manifest,
    Shard,
    TensorEntry,
    load_frozen_manifest,
    load_manifest,
    published_versions,
)
from everlong.weights.sparse import apply_sparse
from everlong.weights.tensors import RawTensor, WeightSet, checksums_of, fingerprint, fingerprint_of
from everlong.weights.whole import decode_full


class WeightReader:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def latest(self) -> int | None:
        """The newest published version, compared as a number; None before the first."""
        return max(self.versions(), default=None)

    def versions(self) -> list[int]:
        """Every published version, ascending."""
        return published_versions(self._store)

    def manifest(self, version: int) -> PublishedVersion:
        """Raises StaleWeights where the version is not published."""
        return self._load(version).published

    def read(self, version: int, have: WeightSet | None = None) -> WeightSet:
        """Version `version` whole, from the deltas on top of `have` or from the last anchor, whichever is nearer.

        Every tensor is verified after it was applied. Never writes to `have`; tensors that did not change are shared
        with it. Raises StaleWeights when no chain leads there, StoreError for an object that is lost or damaged.
        """
        target = self._load(version)
        if have is not None and have.version == version and fingerprint(have) == target.fingerprint:
            return have
        weights = have
        for manifest in self._chain(target, have):
            frozen = self._frozen(manifest, weights)
            weights = self._apply(manifest, weights if manifest.base_version is not None else None, frozen)
        assert weights is not None
        return weights

    def _load(self, version: int) -> Manifest:
        manifest = load_manifest(self._store, version)
        if manifest is None:
            newest = self.latest()
            raise StaleWeights(
                f"version {version} is not published: "
                + ("nothing is yet" if newest is None else f"the newest in the store is {newest}")
            )
        return manifest

    def _chain(self, target: Manifest, have: WeightSet | None) -> list[Manifest]:
        """Oldest first: what to apply, beginning with an anchor or with a delta on `have`."""
        chain = [target]
        while (base := chain[-1].base_version) is not None and not (have is not None and have.version == base):
            manifest = load_manifest(self._store, base)
            if manifest is None:
                raise StaleWeights(
                    _needs_base(chain[-1], have)
                    + f"version {base} is not in the store, so no chain leads to {target.version}; "
                    f"publish {target.version} again as an anchor, under a newer version"
                )
            chain.append(manifest)
        return chain[::-1]

    def _apply(self, manifest: Manifest, have: WeightSet | None, frozen: Mapping[str, RawTensor]) -> WeightSet:
        return apply_version(manifest, have, _Fetched(self, manifest.shards, manifest.version), frozen)

    def _frozen(self, manifest: Manifest, have: WeightSet | None) -> Mapping[str, RawTensor]:
        """What the version stands on: that of `have`, the very object, where it is the same, else out of the store."""
        if manifest.frozen is None:
            return {}
        if have is not None and fingerprint(have.frozen) == manifest.frozen:
            return have.frozen
        found = load_frozen_manifest(self._store, manifest.version, manifest.frozen)
        return _read_tensors(found.tensors, None, _Fetched(self, found.shards, manifest.version), manifest.version)

    def fetch(self, shard: Shard, version: int) -> bytes:
        """Raises StaleWeights where the version was retired in the meantime, StoreError for a lost or damaged shard."""
        try:
            data = self._store.get(shard.key)
        except NotFound as error:
            if load_manifest(self._store, version) is None:
                raise StaleWeights(
                    f"version {version} was retired while it was read: read the newest, which is {self.latest()}"
                ) from error
            raise StoreError(
                f"version {version} lost its shard {shard.key}: restore it, or publish an anchor"
            ) from error
        if blake3.blake3(data).hexdigest() != shard.hash:
            raise StoreError(
                f"shard {shard.key} of version {version} is damaged: expected {shard.size_bytes} bytes with that hash, "
                f"got {len(data)} with {blake3.blake3(data).hexdigest()}; restore it, or publish an anchor"
            )
        return data


NOTHING: Mapping[str, RawTensor] = MappingProxyType({})


class Shards(Protocol):
    """The content of a version's shards, by their index in its manifest."""

    def __getitem__(self, index: int, /) -> bytes: ...


class _Fetched:
    """Shards out of the store when they are asked for; the last one is held, since tensors ask in order."""

    def __init__(self, reader: WeightReader, shards: tuple[Shard, ...], version: int) -> None:
        self._reader, self._shards, self._version = reader, shards, version
        self._held: tuple[int, bytes] | None = None

    def __getitem__(self, index: int) -> bytes:
        if self._held is None or self._held[0] != index:
            self._held = None  # two of them need not be in memory
            self._held = (index, self._reader.fetch(self._shards[index], self._version))
        return self._held[1]


def apply_version(
    manifest: Manifest, have: WeightSet | None, shards: Shards, frozen: Mapping[str, RawTensor] = NOTHING
) -> WeightSet:
    """The manifest's version from its base `have` (None for an anchor), the content of its shards and what it stands on.

    Raises StaleWeights when `have` is not the base, StoreError when what comes out is not what was published.
    """
    if manifest.base_version is not None and (have is None or have.version != manifest.base_version):
        raise StaleWeights(_needs_base(manifest, have) + _what_to_pull(manifest.base_version, have))
    checksums = checksums_of(frozen) | {entry.name: entry.checksum for entry in manifest.tensors}
    if fingerprint_of(checksums) != manifest.fingerprint:
        raise StoreError(f"manifest of version {manifest.version} contradicts its own fingerprint: it is damaged")
    return WeightSet(manifest.version, _read_tensors(manifest.tensors, have, shards, manifest.version), frozen)


def _read_tensors(
    entries: tuple[TensorEntry, ...], have: WeightSet | None, shards: Shards, version: int
) -> dict[str, RawTensor]:
    """Payloads are fetched here, one after the other, while threads apply and verify those before them."""
    num_threads = threads_for(sum(math.prod(entry.shape) for entry in entries if entry.codec is not Codec.SAME))
    read = in_order(
        lambda asked: read_tensor(*asked, have, version),
        ((entry, _payload(entry, shards, version)) for entry in entries),
        num_threads,
    )
    return {entry.name: tensor for entry, tensor in zip(entries, read, strict=True)}


def _payload(entry: TensorEntry, shards: Shards, version: int) -> memoryview:
    if entry.codec is Codec.SAME:
        return memoryview(b"")
    try:
        return memoryview(shards[entry.shard])[entry.offset : entry.offset + entry.size_bytes]
    except IndexError as error:
        raise StoreError(
            f"tensor {entry.name} of version {version} lies in a shard that there is not: {entry.shard}"
        ) from error


def read_tensor(entry: TensorEntry, payload: memoryview, have: WeightSet | None, version: int) -> RawTensor:
    """One tensor of the version, applied and verified; `have` is its base. Raises StoreError."""
    try:
        tensor = _decode_tensor(entry, payload, have)
    except (ValueError, LookupError) as error:
        raise StoreError(f"tensor {entry.name} of version {version} cannot be decoded: {error}") from error
    if tensor.checksum() != entry.checksum:
        raise StoreError(
            f"tensor {entry.name} of version {version} has checksum {tensor.checksum()} after apply, expected "
            f"{entry.checksum}: the base is not what was published as version {have.version if have else None}; "
            f"read the version anew, without base"
        )
    return tensor


def _decode_tensor(entry: TensorEntry, payload: memoryview, have: WeightSet | None) -> RawTensor:
    if entry.codec is Codec.FULL:
        return RawTensor(entry.dtype, entry.shape, decode_full(payload, entry.dtype, entry.shape))
    if have is None or entry.name not in have.tensors:
        raise LookupError("its base is missing")
    old = have.tensors[entry.name]
    return old if entry.codec is Codec.SAME else _APPLY[entry.codec](old, payload)


_APPLY: Mapping[Codec, Callable[[RawTensor, memoryview], RawTensor]] = {
    Codec.SPARSE: apply_sparse,
    Codec.DELTA: apply_delta,
    Codec.STEPS: apply_steps,
}


def _needs_base(manifest: Manifest, have: WeightSet | None) -> str:
    held = "engine holds none" if have is None else f"engine is at {have.version}"
    return f"delta {manifest.version} needs base {manifest.base_version}, {held}: "


def _what_to_pull(base: int, have: WeightSet | None) -> str:
    if have is None or have.version > base:
        return f"read version {base} from its anchor first"
    missing = [str(version) for version in range(have.version + 1, base + 1)]
    return f"pull {' and '.join(missing) if len(missing) < 3 else f'{missing[0]} to {missing[-1]}'} first"
