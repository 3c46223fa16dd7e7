"""What a published version consists of, and the keys under which it lies."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everlong.contracts.errors import NotFound, StoreError
from everlong.contracts.ports import ObjectStore
from everlong.contracts.records import PublishedVersion, Record
from everlong.weights.tensors import WeightDtype
from everlong.weights.zstd import compress, decompress, is_compressed

VERSIONS = "weights/versions/"
SHARDS = "weights/shards/"
FROZEN = "weights/frozen/"
RETIRED = "weights/retired/"

FORMAT = 2
"""Of what is written. Format 1 knew no `Codec.SPARSE` and did not compress its manifests; it is read as well."""

READ_FORMATS = (1, FORMAT)

MANIFEST_BYTES = 1 << 30
"""No manifest is larger: what claims to be is damaged, and must not take the memory."""


class Codec(StrEnum):
    SAME = "same"
    """Bit for bit the base's tensor; no payload."""
    SPARSE = "sparse"
    """Positions and steps of the values that changed, by groups of old exponents."""
    DELTA = "delta"
    """Gaps and steps of the values that changed; in stores of format 1."""
    STEPS = "steps"
    """A step for every value; in stores of format 1."""
    FULL = "full"


class TensorEntry(Record, frozen=True, kw_only=True):
    """One tensor of a version.

    Example: TensorEntry(name="head.weight", dtype="bfloat16", shape=(512, 64), codec=Codec.DELTA, checksum="5f..",
             num_changed=301, shard=0, offset=0, size_bytes=412)
    """

    name: str
    dtype: WeightDtype
    shape: tuple[int, ...]
    codec: Codec
    checksum: str
    """xxh3-128 of the tensor after apply."""
    num_changed: int
    shard: int = -1
    """Index into the manifest's shards; -1 without payload."""
    offset: int = 0
    size_bytes: int = 0


class Shard(Record, frozen=True, kw_only=True):
    """An object that holds payloads back to back; its name is the hash of its content."""

    hash: str
    """blake3, hex."""
    size_bytes: int

    @property
    def key(self) -> str:
        return SHARDS + self.hash


class Manifest(Record, frozen=True, kw_only=True):
    """Everything about one version. It is written after its shards, so whoever sees it can read the version whole."""

    version: int
    base_version: int | None
    """None for an anchor."""
    num_deltas: int
    """Deltas between the last anchor and this version; 0 for an anchor."""
    fingerprint: str
    """Of all that a token is computed with, what is frozen included."""
    num_values: int
    num_changed: int
    """Against the base that was given when it was published; all of them without one."""
    shards: tuple[Shard, ...]
    tensors: tuple[TensorEntry, ...]
    frozen: str | None = None
    """Fingerprint of the frozen weights that these tensors stand on; None where there are none."""
    format: int = FORMAT

    @property
    def published(self) -> PublishedVersion:
        return PublishedVersion(
            version=self.version,
            base_version=self.base_version,
            size_bytes=sum(shard.size_bytes for shard in self.shards),
            num_values=self.num_values,
            num_changed=self.num_changed,
            fingerprint=self.fingerprint,
        )


class FrozenManifest(Record, frozen=True, kw_only=True):
    """The weights that stay, whole, once for all versions that stand on them. Written after its shards."""

    fingerprint: str
    shards: tuple[Shard, ...]
    tensors: tuple[TensorEntry, ...]


def frozen_key(fingerprint: str) -> str:
    return FROZEN + fingerprint


def load_frozen_manifest(store: ObjectStore, version: int, fingerprint: str) -> FrozenManifest:
    """Raises StoreError where it is lost or damaged: adapters alone are no policy."""
    key = frozen_key(fingerprint)
    try:
        return msgspec.json.decode(store.get(key), type=FrozenManifest)
    except NotFound as error:
        raise StoreError(
            f"version {version} holds adapters alone, and the frozen weights {fingerprint} that they stand on are not in the "
            f"store: restore {key} and its shards, or start a run of its own"
        ) from error
    except msgspec.DecodeError as error:
        raise StoreError(f"{key}, on which version {version} stands, is damaged: {error}") from error


def version_key(version: int) -> str:
    return f"{VERSIONS}{version:08d}"


def retired_key(version: int) -> str:
    """Names the shards of a version whose manifest is gone, until they are gone too."""
    return f"{RETIRED}{version:08d}"


def published_versions(store: ObjectStore) -> list[int]:
    """Ascending, compared as numbers."""
    return sorted(int(key.removeprefix(VERSIONS)) for key in store.list(VERSIONS))


def encode_manifest(manifest: Manifest) -> bytes:
    return compress(msgspec.json.encode(manifest), checksum=True)


def load_manifest(store: ObjectStore, version: int) -> Manifest | None:
    """None where the version is not published. Raises StoreError for one that cannot be read."""
    try:
        raw = store.get(version_key(version))
    except NotFound:
        return None
    try:
        raw = decompress(raw, MANIFEST_BYTES) if is_compressed(raw) else raw
        head = msgspec.json.decode(raw, type=_Head)
        manifest = msgspec.json.decode(raw, type=Manifest) if head.format in READ_FORMATS else None
    except (msgspec.DecodeError, ValueError) as error:
        raise StoreError(
            f"manifest of version {version} is damaged ({error}): publish the version elsewhere"
        ) from error
    if manifest is None or manifest.version != version:
        raise StoreError(
            f"manifest {version_key(version)} says version {head.version}, format {head.format}; "
            f"expected version {version}, format {' or '.join(map(str, READ_FORMATS))}: it was written by another everlong "
            f"or moved"
        )
    return manifest


class _Head(Record, frozen=True, kw_only=True):
    """Of a manifest in any format."""

    version: int
    format: int = 1
