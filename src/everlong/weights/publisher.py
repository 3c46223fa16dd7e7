"""Puts versions into the object store: shards first, the manifest last."""

from __future__ import annotations

from dataclasses import dataclass, field

import blake3
import msgspec

from everlong.contracts.errors import AlreadyExists
from everlong.contracts.ports import ObjectStore
from everlong.contracts.records import PublishedVersion
from everlong.weights.codec import count_changed, encode_delta, encode_full, encode_steps
from everlong.weights.manifest import (
    FROZEN,
    Codec,
    FrozenManifest,
    Manifest,
    Shard,
    TensorEntry,
    encode_manifest,
    frozen_key,
    load_manifest,
    version_key,
)
from everlong.weights.tensors import RawTensor, WeightSet, fingerprint, fingerprint_of

SHARD_BYTES = 64 << 20
"""A shard closes once it holds this much: large enough for throughput, small enough to fetch many in parallel."""


class WeightPublisher:
    def __init__(self, store: ObjectStore, anchor_every: int) -> None:
        """`anchor_every`: versions from one anchor to the next; 1 publishes every version whole."""
        if anchor_every < 1:
            raise ValueError(f"anchor_every counts versions and is at least 1, got {anchor_every}")
        self._store, self._anchor_every = store, anchor_every

    def publish(self, weights: WeightSet, base: WeightSet | None) -> PublishedVersion:
        """Publish `weights` as a delta against `base`, or as an anchor: without base, or when one is due. What is frozen goes
        into the store once, before the first version that stands on it, and into no version.

        Publishing the same version with the same bits again returns the first. Raises ValueError for a NaN, a base that
        is not published or was changed since; AlreadyExists when the version is taken by other weights; StoreError.
        """
        _refuse_nan(weights)
        checksums = {name: tensor.checksum() for name, tensor in {**weights.frozen, **weights.tensors}.items()}
        taken = load_manifest(self._store, weights.version)
        if taken is not None:
            return _same_or_refuse(taken, fingerprint_of(checksums))
        frozen = self._keep_frozen(weights, checksums) if weights.frozen else None
        manifest, shards = self._encode(weights, base, checksums, frozen)
        self._put(manifest.shards, shards)
        return self._commit(manifest)

    def _keep_frozen(self, weights: WeightSet, checksums: dict[str, str]) -> str:
        """Put them into the store where they are not yet; their fingerprint."""
        frozen = fingerprint_of({name: checksums[name] for name in weights.frozen})
        if frozen_key(frozen) in self._store.list(FROZEN):
            return frozen
        payloads = _Payloads()
        entries = [
            _encode_tensor(name, tensor, None, True, checksums[name], payloads)
            for name, tensor in sorted(weights.frozen.items())
        ]
        shards = payloads.close()
        manifest = FrozenManifest(fingerprint=frozen, shards=_named(shards), tensors=tuple(entries))
        self._put(manifest.shards, shards)
        self._store.put(frozen_key(frozen), msgspec.json.encode(manifest))
        return frozen

    def _put(self, shards: tuple[Shard, ...], contents: list[bytes]) -> None:
        for shard, data in zip(shards, contents, strict=True):
            self._store.put(shard.key, data)

    def _encode(
        self, weights: WeightSet, base: WeightSet | None, checksums: dict[str, str], frozen: str | None
    ) -> tuple[Manifest, list[bytes]]:
        num_deltas = 0 if base is None else self._deltas_since_anchor(weights.version, base)
        anchor = base is None or num_deltas >= self._anchor_every
        payloads = _Payloads()
        entries = [
            _encode_tensor(name, tensor, base, anchor, checksums[name], payloads)
            for name, tensor in sorted(weights.tensors.items())
        ]
        shards = payloads.close()
        manifest = Manifest(
            version=weights.version,
            base_version=None if anchor or base is None else base.version,
            num_deltas=0 if anchor else num_deltas,
            fingerprint=fingerprint_of(checksums),
            num_values=weights.num_values,
            num_changed=sum(entry.num_changed for entry in entries),
            shards=_named(shards),
            tensors=tuple(entries),
            frozen=frozen,
        )
        return manifest, shards

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


DENSE_SHARE = 1 / 3
"""Of the values changed from which on every value gets a step: then gaps take longer to apply than an anchor to decode,
and save little or nothing; from a half on they are the larger coding."""


@dataclass(slots=True)
class _Payloads:
    """Payloads back to back, cut into shards."""

    shards: list[bytearray] = field(default_factory=lambda: [bytearray()])

    def add(self, payload: bytes) -> tuple[int, int]:
        """(shard, offset) of the payload."""
        if len(self.shards[-1]) >= SHARD_BYTES:
            self.shards.append(bytearray())
        offset = len(self.shards[-1])
        self.shards[-1] += payload
        return len(self.shards) - 1, offset

    def close(self) -> list[bytes]:
        return [bytes(shard) for shard in self.shards if shard]


def _named(shards: list[bytes]) -> tuple[Shard, ...]:
    return tuple(Shard(hash=blake3.blake3(data).hexdigest(), size_bytes=len(data)) for data in shards)


def _encode_tensor(
    name: str, tensor: RawTensor, base: WeightSet | None, anchor: bool, checksum: str, payloads: _Payloads
) -> TensorEntry:
    old = None if base is None else base.tensors.get(name)
    if old is not None and not old.same_layout(tensor):
        old = None
    num_changed = tensor.size if old is None else count_changed(old, tensor)
    entry = TensorEntry(
        name=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        codec=Codec.SAME,
        checksum=checksum,
        num_changed=num_changed,
    )
    if not anchor and old is not None and num_changed == 0:
        return entry
    codec, payload = (Codec.FULL, encode_full(tensor)) if anchor or old is None else _smaller(old, tensor, num_changed)
    shard, offset = payloads.add(payload)
    return TensorEntry(
        name=name,
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        codec=codec,
        checksum=checksum,
        num_changed=num_changed,
        shard=shard,
        offset=offset,
        size_bytes=len(payload),
    )


def _smaller(old: RawTensor, new: RawTensor, num_changed: int) -> tuple[Codec, bytes]:
    codec, encode = (Codec.STEPS, encode_steps) if num_changed > DENSE_SHARE * new.size else (Codec.DELTA, encode_delta)
    delta = encode(old, new)
    # Trained weights never compress fourfold as a whole, so the second coding is only tried where it can win.
    if 4 * len(delta) <= new.bits.nbytes:
        return codec, delta
    full = encode_full(new)
    return (codec, delta) if len(delta) <= len(full) else (Codec.FULL, full)


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
