"""Takes versions out of the object store: the shortest chain of manifests, applied and verified one by one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import blake3

from everlong.contracts.errors import NotFound, StaleWeights, StoreError
from everlong.contracts.ports import ObjectStore
from everlong.contracts.records import PublishedVersion
from everlong.weights.codec import apply_delta, apply_steps, decode_full
from everlong.weights.manifest import (
    VERSIONS,
    Codec,
    Manifest,
    Shard,
    TensorEntry,
    load_frozen_manifest,
    load_manifest,
)
from everlong.weights.tensors import RawTensor, WeightSet, fingerprint, fingerprint_of


class WeightReader:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def latest(self) -> int | None:
        """The newest published version, compared as a number; None before the first."""
        return max(self.versions(), default=None)

    def versions(self) -> list[int]:
        """Every published version, ascending."""
        return sorted(int(key.removeprefix(VERSIONS)) for key in self._store.list(VERSIONS))

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
        shards = [self._fetch(shard, manifest.version) for shard in manifest.shards]
        return apply_version(manifest, have, shards, frozen)

    def _frozen(self, manifest: Manifest, have: WeightSet | None) -> Mapping[str, RawTensor]:
        """What the version stands on: that of `have`, the very object, where it is the same, else out of the store."""
        if manifest.frozen is None:
            return {}
        if have is not None and fingerprint(have.frozen) == manifest.frozen:
            return have.frozen
        found = load_frozen_manifest(self._store, manifest.version, manifest.frozen)
        shards = [self._fetch(shard, manifest.version) for shard in found.shards]
        return {entry.name: _read_tensor(entry, None, shards, manifest.version) for entry in found.tensors}

    def _fetch(self, shard: Shard, version: int) -> bytes:
        try:
            data = self._store.get(shard.key)
        except NotFound as error:
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


def apply_version(
    manifest: Manifest, have: WeightSet | None, shards: list[bytes], frozen: Mapping[str, RawTensor] = NOTHING
) -> WeightSet:
    """The manifest's version from its base `have` (None for an anchor), the content of its shards and what it stands on; pure.

    Raises StaleWeights when `have` is not the base, StoreError when what comes out is not what was published.
    """
    if manifest.base_version is not None and (have is None or have.version != manifest.base_version):
        raise StaleWeights(_needs_base(manifest, have) + _what_to_pull(manifest.base_version, have))
    tensors = {entry.name: _read_tensor(entry, have, shards, manifest.version) for entry in manifest.tensors}
    checksums = {name: tensor.checksum() for name, tensor in frozen.items()}
    if fingerprint_of(checksums | {entry.name: entry.checksum for entry in manifest.tensors}) != manifest.fingerprint:
        raise StoreError(f"manifest of version {manifest.version} contradicts its own fingerprint: it is damaged")
    return WeightSet(manifest.version, tensors, frozen)


def _read_tensor(entry: TensorEntry, have: WeightSet | None, shards: list[bytes], version: int) -> RawTensor:
    try:
        tensor = _decode_tensor(entry, have, shards)
    except (ValueError, LookupError) as error:
        raise StoreError(f"tensor {entry.name} of version {version} cannot be decoded: {error}") from error
    if tensor.checksum() != entry.checksum:
        raise StoreError(
            f"tensor {entry.name} of version {version} has checksum {tensor.checksum()} after apply, expected "
            f"{entry.checksum}: the base is not what was published as version {have.version if have else None}; "
            f"read the version anew, without base"
        )
    return tensor


def _decode_tensor(entry: TensorEntry, have: WeightSet | None, shards: list[bytes]) -> RawTensor:
    payload = b"" if entry.codec is Codec.SAME else shards[entry.shard][entry.offset : entry.offset + entry.size_bytes]
    if entry.codec is Codec.FULL:
        return RawTensor(entry.dtype, entry.shape, decode_full(payload, entry.dtype, entry.shape))
    if have is None or entry.name not in have.tensors:
        raise LookupError("its base is missing")
    old = have.tensors[entry.name]
    if entry.codec is Codec.SAME:
        return old
    return apply_steps(old, payload) if entry.codec is Codec.STEPS else apply_delta(old, payload)


def _needs_base(manifest: Manifest, have: WeightSet | None) -> str:
    held = "engine holds none" if have is None else f"engine is at {have.version}"
    return f"delta {manifest.version} needs base {manifest.base_version}, {held}: "


def _what_to_pull(base: int, have: WeightSet | None) -> str:
    if have is None or have.version > base:
        return f"read version {base} from its anchor first"
    missing = [str(version) for version in range(have.version + 1, base + 1)]
    return f"pull {' and '.join(missing) if len(missing) < 3 else f'{missing[0]} to {missing[-1]}'} first"
