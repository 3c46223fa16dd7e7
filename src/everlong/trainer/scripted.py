"""The fake that ships: no network and no torch, but versions, checkpoints and published weights like the real one.

Its one tensor moves by a number that the batch decides, so that runs which trained the same batches in the same order,
and only those, end with the same bits.
"""

from __future__ import annotations

import contextlib
import json

import numpy as np
import xxhash

from everlong.contracts.errors import AlreadyExists
from everlong.contracts.ports import ObjectStore
from everlong.contracts.records import (
    PublishedVersion,
    Reconciled,
    ScoredColumns,
    ScoreRequest,
    TrainBatch,
    TrainerStatus,
    TrainReport,
    encode_record,
)
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet, fingerprint

NUM_VALUES = 64


class ScriptedTrainer:
    def __init__(self, store: ObjectStore, publisher: WeightPublisher) -> None:
        self._store, self._publisher = store, publisher
        self._values = np.zeros(NUM_VALUES, np.float32)
        self._num_batches = 0
        self._published: WeightSet | None = None

    async def train(self, batch: TrainBatch) -> TrainReport:
        if batch.batch != self._num_batches:
            raise ValueError(f"expected batch {self._num_batches}, got batch {batch.batch}")
        content = np.random.default_rng(xxhash.xxh3_64_intdigest(encode_record(batch)))
        if batch.num_trainable:
            self._values = (self._values + content.standard_normal(NUM_VALUES)).astype(np.float32)
        self._num_batches += 1
        return TrainReport(
            batch=batch.batch,
            policy_version=self._num_batches,
            num_updates=int(batch.num_trainable > 0),
            metrics={"tokens/trained": float(batch.num_trainable)},
        )

    async def score(self, request: ScoreRequest) -> ScoredColumns:
        """What was recorded at sampling: this policy never changes its mind, and it has no critic."""
        logprobs = None
        if "logprobs" in request.wanted:
            logprobs = tuple(micro_batch.columns.logprobs for micro_batch in request.micro_batches)
        return ScoredColumns(logprobs=logprobs, policy_version=self._num_batches)

    async def save(self) -> TrainerStatus:
        content = json.dumps([float(value) for value in self._values]).encode()
        with contextlib.suppress(AlreadyExists):  # checkpoints are never rewritten
            self._store.create(self._key(self._num_batches), content)
        return self._status()

    async def restore(self, num_batches: int | None = None) -> TrainerStatus:
        usable = [number for number in self._saved() if num_batches is None or number <= num_batches]
        self._num_batches = max(usable, default=0)
        self._values = np.zeros(NUM_VALUES, np.float32)
        if usable:
            self._values = np.array(json.loads(self._store.get(self._key(self._num_batches))), np.float32)
        self._published = None
        return self._status()

    async def reconcile(self) -> Reconciled:
        version, trained, reader = self._num_batches, self._status().fingerprint, WeightReader(self._store)
        if version not in reader.versions():
            return Reconciled(policy_version=version, trained=trained, published=None)
        published = reader.read(version)
        self._values = published.tensors["values"].bits.view(np.float32).copy()
        return Reconciled(policy_version=version, trained=trained, published=fingerprint(published))

    async def publish(self) -> PublishedVersion:
        weights = self._weights()
        published = self._publisher.publish(weights, self._published)
        self._publisher.retire(published.version, self._saved)
        self._published = weights
        return published

    async def export(self, folder: str) -> None:
        raise ValueError("the scripted model has no network: there is no checkpoint to export")

    async def close(self) -> None:
        """Nothing to close."""

    def _weights(self) -> WeightSet:
        bits = self._values.copy().view(np.uint32)
        return WeightSet(self._num_batches, {"values": RawTensor("float32", bits.shape, bits)})

    def _status(self) -> TrainerStatus:
        return TrainerStatus(
            num_batches=self._num_batches, policy_version=self._num_batches, fingerprint=fingerprint(self._weights())
        )

    def _saved(self) -> list[int]:
        return [int(key.rsplit("/", 1)[-1]) for key in self._store.list("checkpoints/")]

    @staticmethod
    def _key(num_batches: int) -> str:
        return f"checkpoints/{num_batches:06d}"
