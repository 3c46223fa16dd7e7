"""Checkpoints in the object store: the tensors first, under the name of their hash, and a create-only manifest last.

A checkpoint is there whole or not at all: whoever sees a manifest can read everything that it names, and a writer that
was killed before it leaves nothing that a reader sees.
"""

from __future__ import annotations

import blake3
import msgspec
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from everlong.contracts.errors import AlreadyExists, NotFound, StoreError
from everlong.contracts.ports import ObjectStore
from everlong.contracts.records import Record

PREFIX = "checkpoints"
MANIFEST = "manifest.json"


class CheckpointManifest(Record, frozen=True, kw_only=True):
    """What a checkpoint holds, beside the tensors."""

    num_batches: int
    seed: int
    """Of the run that wrote it."""
    fingerprint: str
    """Of the policy's weights, as they are published."""
    critic: str | None = None
    """Fingerprint of the critic's weights; None without one. While it learns alone, the policy's says nothing."""
    tensors_hash: str
    """blake3 of the safetensors bytes, which is also their name."""
    size_bytes: int
    format: int = 1

    @property
    def tensors_key(self) -> str:
        return f"{PREFIX}/{self.num_batches:06d}/{self.tensors_hash}.safetensors"


class CheckpointStore:
    def __init__(self, store: ObjectStore, keep: int) -> None:
        """`keep`: how many of the newest checkpoints stay."""
        self._store, self._keep = store, keep

    def save(
        self, num_batches: int, seed: int, fingerprint: str, tensors: dict[str, Tensor], critic: str | None = None
    ) -> None:
        """A checkpoint of the same batch and weights is left as it is; AlreadyExists where the weights are others. `critic` is the
        fingerprint of the critic's."""
        if num_batches in self.numbers():
            return self._same_or_refuse(num_batches, fingerprint, critic)
        data = save(tensors)
        manifest = CheckpointManifest(
            num_batches=num_batches,
            seed=seed,
            fingerprint=fingerprint,
            critic=critic,
            tensors_hash=blake3.blake3(data).hexdigest(),
            size_bytes=len(data),
        )
        self._store.put(manifest.tensors_key, data)
        try:
            self._store.create(_manifest_key(num_batches), msgspec.json.encode(manifest))
        except AlreadyExists:
            self._same_or_refuse(num_batches, fingerprint, critic)
        self._sweep()

    def numbers(self) -> list[int]:
        """The batch counts of every whole checkpoint, ascending."""
        keys = self._store.list(PREFIX)
        return [int(key.split("/")[1]) for key in keys if key.endswith(f"/{MANIFEST}")]

    def load(self, num_batches: int) -> tuple[CheckpointManifest, dict[str, Tensor]]:
        """Raises StoreError for a damaged one, naming those that are older."""
        try:
            manifest = self._manifest(num_batches)
            data = self._store.get(manifest.tensors_key)
            if blake3.blake3(data).hexdigest() != manifest.tensors_hash:
                raise StoreError(f"the bytes of {manifest.tensors_key} are not those that were written")
            return manifest, load(data)
        except (NotFound, StoreError, SafetensorError) as error:
            older = [number for number in self.numbers() if number < num_batches]
            advice = f"restore an older one, with num_batches={older[-1]}" if older else "there is no older one"
            raise StoreError(f"checkpoint {num_batches} is damaged ({error}): {advice}") from error

    def _manifest(self, num_batches: int) -> CheckpointManifest:
        try:
            manifest = msgspec.json.decode(self._store.get(_manifest_key(num_batches)), type=CheckpointManifest)
        except msgspec.DecodeError as error:
            raise StoreError(f"its manifest cannot be read: {error}") from error
        if manifest.format != 1 or manifest.num_batches != num_batches:
            raise StoreError(f"its manifest says format {manifest.format}, batch {manifest.num_batches}")
        return manifest

    def _same_or_refuse(self, num_batches: int, fingerprint: str, critic: str | None) -> None:
        taken = self._manifest(num_batches)
        pairs = [("weights", taken.fingerprint, fingerprint), ("a critic", taken.critic, critic)]
        for what, theirs, mine in pairs:
            if theirs != mine:
                raise AlreadyExists(
                    f"checkpoint {num_batches} holds {what} {theirs}, the trainer now has {mine}: training went on from an older "
                    "checkpoint and came out different; give the run a store of its own"
                )

    def _sweep(self) -> None:
        """Remove all but the newest, manifests first, and what killed writers left before them."""
        oldest = self.numbers()[-self._keep :][0]
        stale = [key for key in self._store.list(PREFIX) if int(key.split("/")[1]) < oldest]
        for key in sorted(stale, key=lambda key: not key.endswith(MANIFEST)):
            self._store.delete(key)


def _manifest_key(num_batches: int) -> str:
    return f"{PREFIX}/{num_batches:06d}/{MANIFEST}"
