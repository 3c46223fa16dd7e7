"""Seeded schedules of faults between a trainer, a second writer and readers: nobody ever holds other bits than were published.

Publishers are killed at any call to the store, or do not hear that a call arrived; a second trainer writes the same versions, with
the same weights or with others, between any two calls of the first; shards and manifests are damaged, cut, exchanged or lost,
where they lie and on the way; versions are retired, also in the middle of a reader's work. Everything is drawn from the seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from everlong.contracts.errors import AlreadyExists, NotFound, StaleWeights, StoreError
from everlong.contracts.ports import ObjectStore
from everlong.storage import open_store
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet, fingerprint
from everlong.weights.manifest import SHARDS, VERSIONS, version_key

VERSIONS_OF_A_RUN, READERS = 8, 3
SCHEDULES, BATCHES = 600, 6


class Killed(BaseException):
    """The process is gone: no handler of its own sees this."""


def weights(version: int, seed: int) -> WeightSet:
    """What a trainer with this seed holds after so many batches."""
    rng = np.random.default_rng([seed, 0])
    bits, steps = rng.integers(0x3A00, 0x3E00, 200), np.random.default_rng([seed, 1])
    for _ in range(version):
        bits = bits + (steps.random(200) < 0.1) * steps.integers(1, 3, 200)
    redrawn = np.random.default_rng([seed, 2, version]).integers(0, 0x7F800000, 9)
    return WeightSet(
        version,
        {
            "drifting": RawTensor("bfloat16", (20, 10), bits.astype(np.uint16).reshape(20, 10)),
            "redrawn": RawTensor("float32", (9,), redrawn.astype(np.uint32)),
            "still": RawTensor("bfloat16", (4,), np.arange(4, dtype=np.uint16)),
        },
    )


@dataclass
class World:
    """What lies in the store, who put each version there, and what happened."""

    random: random.Random
    store: ObjectStore = field(default_factory=lambda: open_store("memory://"))
    published: dict[int, WeightSet] = field(default_factory=dict)
    happened: Counter[str] = field(default_factory=Counter)

    def chance(self, share: float) -> bool:
        return self.random.random() < share


class WriterStore:
    """A trainer's way to the store. Before the call of number `dies_at` it is killed; `between` runs before one of the calls."""

    def __init__(
        self, world: World, mine: Callable[[int], WeightSet], dies_at: int, between: Callable[[], None]
    ) -> None:
        self._world, self._mine, self._left, self._between = world, mine, dies_at, between
        self._between_at = world.random.randrange(8)

    def _call(self) -> None:
        self._left -= 1
        if self._left < 0:
            self._world.happened["killed"] += 1
            raise Killed
        self._between_at -= 1
        if self._between_at == 0:
            self._between()

    def create(self, key: str, data: bytes) -> None:
        self._call()
        self._world.store.create(key, data)
        version = int(key.removeprefix(VERSIONS))
        assert version not in self._world.published or version_key(version) == key
        self._world.published[version] = self._mine(version)
        self._lose_the_answer(key)

    def put(self, key: str, data: bytes) -> None:
        self._call()
        self._world.store.put(key, data)
        self._lose_the_answer(key)

    def _lose_the_answer(self, key: str) -> None:
        if self._world.chance(0.08):
            self._world.happened["answer lost"] += 1
            raise StoreError(f"no answer came for {key}")

    def get(self, key: str) -> bytes:
        self._call()
        return self._world.store.get(key)

    def list(self, prefix: str) -> list[str]:
        self._call()
        return self._world.store.list(prefix)

    def delete(self, key: str) -> None:
        self._call()
        self._world.store.delete(key)


class ReaderStore:
    """A reader's way to the store: what it gets may be damaged, and others go on working between its calls."""

    def __init__(self, world: World, faulty: bool, between: Callable[[], None]) -> None:
        self._world, self._faulty, self._between = world, faulty, between

    def get(self, key: str) -> bytes:
        if self._faulty and self._world.chance(0.1):
            self._between()
        data = self._world.store.get(key)
        return damaged(self._world, key, data) if self._faulty and self._world.chance(0.08) else data

    def list(self, prefix: str) -> list[str]:
        return self._world.store.list(prefix)

    def create(self, key: str, data: bytes) -> None:
        raise AssertionError("a reader writes nothing")

    put = create

    def delete(self, key: str) -> None:
        raise AssertionError("a reader deletes nothing")


def damaged(world: World, key: str, data: bytes) -> bytes:
    """Another content, or none."""
    kind = world.random.choice(["flipped", "cut", "exchanged", "lost", "empty"])
    world.happened[kind] += 1
    if kind == "lost":
        raise NotFound(f"there is no {key}")
    if kind == "flipped" and data:
        at = world.random.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << world.random.randrange(8)]) + data[at + 1 :]
    if kind == "cut":
        return data[: world.random.randrange(len(data) + 1)]
    if kind == "exchanged":
        others = world.store.list(SHARDS if key.startswith(SHARDS) else VERSIONS)
        return world.store.get(world.random.choice(others)) if others else data
    return b""


class Trainer:
    """Publishes its versions one after the other; after a kill it starts again from some version before."""

    def __init__(self, world: World, seed: int, keep: int | None, rival: Trainer | None) -> None:
        self.world, self.seed, self.keep, self.rival = world, seed, keep, rival
        self.anchor_every = world.random.choice([1, 3, 100])
        self.version, self.base, self.stopped = 0, None, False

    def step(self) -> None:
        if self.stopped or self.version >= VERSIONS_OF_A_RUN:
            return
        dies_at = self.world.random.randrange(12) if self.world.chance(0.3) else 10**6
        store = WriterStore(self.world, lambda version: weights(version, self.seed), dies_at, self._rival_steps)
        publisher, mine = WeightPublisher(store, self.anchor_every, self.keep), weights(self.version, self.seed)
        try:
            published = publisher.publish(mine, self.base)
            assert published.fingerprint == fingerprint(mine)
            publisher.retire(self.version)
        except Killed:
            self.base, self.version = None, self.world.random.randint(max(0, self.version - 3), self.version)
        except AlreadyExists as error:
            assert "is published with fingerprint" in str(error)
            self.world.happened["the other won"] += 1
            self.stopped = True
        except (StoreError, ValueError) as error:
            assert str(error)
            self.base = None  # the run stops with this and is resumed
        else:
            self.base, self.version = mine, self.version + 1

    def _rival_steps(self) -> None:
        if self.rival is not None:
            self.world.happened["two writers"] += 1
            self.rival.step()


class Reader:
    def __init__(self, world: World) -> None:
        self.world, self.held = world, None

    def step(self, faulty: bool, between: Callable[[], None], version: int | None = None) -> None:
        """Read a version and compare every bit with what was published; refusals leave what is held."""
        reader = WeightReader(ReaderStore(self.world, faulty, between))
        before = None if self.held is None else fingerprint(self.held)
        try:
            if version is None:
                there = reader.versions()
                version = self.world.random.choice(there) if there and self.world.chance(0.5) else reader.latest()
            if version is None:
                return
            read = reader.read(version, self.held if self.world.chance(0.8) else None)
        except (StaleWeights, StoreError) as error:
            assert faulty or self.world.happened["at rest"], f"refused without a reason: {error}"
            assert len(str(error)) > 20, "the reason is said"
            self.world.happened["refused"] += 1
        else:
            assert read.version == version
            if fingerprint(read) != fingerprint(self.world.published[version]):
                self.world.happened["SILENT DIVERGENCE"] += 1
            self.world.happened["read"] += 1
            self.held = read
            return
        assert before == (None if self.held is None else fingerprint(self.held))


def run_schedule(seed: int) -> Counter[str]:
    world = World(random.Random(seed))
    others = 1000 + seed if world.chance(0.5) else seed
    rival = Trainer(world, others, None, None) if world.chance(0.5) else None
    trainer = Trainer(world, seed, world.random.choice([None, 2, 3]), rival)
    readers = [Reader(world) for _ in range(READERS)]
    for _ in range(4 * VERSIONS_OF_A_RUN):
        trainer.step()
        world.random.choice(readers).step(True, trainer.step)
        if world.chance(0.05) and (keys := world.store.list("weights")):
            _damage_at_rest(world, world.random.choice(keys))
    _heal(world, readers)
    return world.happened


def _damage_at_rest(world: World, key: str) -> None:
    world.happened["at rest"] += 1
    try:
        data = damaged(world, key, world.store.get(key))
    except NotFound:
        world.store.delete(key)
    else:
        world.store.put(key, data)


def _heal(world: World, readers: list[Reader]) -> None:
    """Without faults, one more anchor brings every reader to the same bits, whatever it has been through."""
    last = weights(100, 7)
    WeightPublisher(world.store, 10).publish(last, None)
    world.published[100] = last
    for reader in readers:
        reader.step(False, lambda: None, 100)
        assert reader.held is not None and fingerprint(reader.held) == fingerprint(last)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_schedule_of_faults_gives_a_reader_other_bits_than_were_published(batch: int) -> None:
    happened: Counter[str] = Counter()
    for number in range(SCHEDULES // BATCHES):
        happened += run_schedule(batch * SCHEDULES + number)
    assert happened["SILENT DIVERGENCE"] == 0
    often = [
        "killed",
        "answer lost",
        "two writers",
        "the other won",
        "flipped",
        "cut",
        "exchanged",
        "lost",
        "at rest",
        "refused",
    ]
    assert all(happened[what] >= 10 for what in often), happened
    assert happened["read"] > 10 * SCHEDULES // BATCHES, happened
