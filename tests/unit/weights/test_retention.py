"""Old versions leave the store, and nobody who reads is stranded."""

import itertools

import numpy as np
import pytest

from everlong.contracts.errors import StaleWeights
from everlong.storage import ObstoreStore, open_store
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet, fingerprint
from everlong.weights.manifest import RETIRED, SHARDS, VERSIONS, load_manifest


def versions(count: int) -> list[WeightSet]:
    rng = np.random.default_rng(0)
    bits, made = rng.integers(0x3C00, 0x3E00, 600).astype(np.uint16), []
    for number in range(count):
        bits = bits + (rng.random(600) < 0.05).astype(np.uint16)
        made.append(WeightSet(number, {"w": RawTensor("bfloat16", (600,), bits)}))
    return made


def publish(store: ObstoreStore, count: int, keep: int | None, anchor_every: int = 3, needed: tuple[int, ...] = ()):
    publisher, made = WeightPublisher(store, anchor_every, keep), versions(count)
    for base, weights in zip([None, *made], made, strict=False):
        publisher.publish(weights, base)
        publisher.retire(weights.version, lambda: needed)
    return made


@pytest.fixture
def store() -> ObstoreStore:
    return open_store("memory://")


def test_the_newest_stay_with_all_that_they_are_read_from(store: ObstoreStore) -> None:
    made = publish(store, 11, keep=2)
    reader = WeightReader(store)
    assert reader.versions() == [9, 10], "10 stands on the anchor 9"
    assert all(fingerprint(reader.read(number)) == fingerprint(made[number]) for number in reader.versions())
    publish(store, 12, keep=2)
    assert reader.versions() == [9, 10, 11]


def test_without_a_number_everything_stays(store: ObstoreStore) -> None:
    publish(store, 11, keep=None)
    assert WeightReader(store).versions() == list(range(11)) and store.list(RETIRED) == []


def test_what_a_checkpoint_stands_on_stays(store: ObstoreStore) -> None:
    made = publish(store, 11, keep=2, needed=(5,))
    assert WeightReader(store).versions() == [3, 4, 5, 9, 10]
    assert fingerprint(WeightReader(store).read(5)) == fingerprint(made[5])


def test_shards_outlive_their_manifest_until_the_next_version(store: ObstoreStore) -> None:
    """Whoever had read the manifest before can still read what it names."""
    made = versions(7)
    publisher = WeightPublisher(store, 3, keep=2)
    for base, weights in zip([None, *made[:3]], made[:3], strict=False):
        publisher.publish(weights, base)
    manifests = [load_manifest(store, number) for number in range(3)]
    for base, weights in itertools.pairwise(made[2:5]):
        publisher.publish(weights, base)
    publisher.retire(4)
    assert WeightReader(store).versions() == [3, 4]
    assert all(store.get(shard.key) for manifest in manifests for shard in manifest.shards)
    publisher.publish(made[5], made[4])
    publisher.retire(5)
    assert len(store.list(SHARDS)) == 3 and store.list(RETIRED) == []


def test_whoever_reads_what_is_given_up_meanwhile_is_told_the_newest(store: ObstoreStore) -> None:
    publish(store, 4, keep=None)

    class Slow(WeightReader):
        def fetch(self, shard, version):
            if version == 1:
                publish(store, 11, keep=2)
            return super().fetch(shard, version)

    with pytest.raises(StaleWeights, match="version 1 was retired while it was read: read the newest, which is 10"):
        Slow(store).read(2)


def test_versions_above_the_newest_are_not_given_up(store: ObstoreStore) -> None:
    """A run that goes on from an older checkpoint publishes below what it had published before."""
    made = publish(store, 11, keep=None)
    publisher = WeightPublisher(store, 3, keep=2)
    publisher.publish(made[5], None)
    publisher.retire(5)
    assert WeightReader(store).versions() == [3, 4, 5, 6, 7, 8, 9, 10]


def test_a_killed_retirement_leaves_only_what_can_be_read_and_is_finished_later(store: ObstoreStore) -> None:
    class Dies(Exception):
        pass

    class DyingStore(ObstoreStore):
        left = 0

        def delete(self, key: str) -> None:
            self.left -= 1
            if self.left < 0:
                raise Dies(key)
            super().delete(key)

    for left in range(12):
        store = open_store("memory://")
        made = publish(store, 8, keep=None)
        dying = DyingStore(store._client, "dying")
        dying.left = left
        with pytest.raises(Dies):
            for _ in range(2):
                WeightPublisher(dying, 3, keep=2).retire(7)
        reader = WeightReader(store)
        for number in reader.versions():
            assert fingerprint(reader.read(number)) == fingerprint(made[number])
        for _ in range(2):
            WeightPublisher(store, 3, keep=2).retire(7)
        assert reader.versions() == [6, 7] and len(store.list(SHARDS)) == 2 and store.list(RETIRED) == []


@pytest.mark.parametrize("keep", [1, 0, -3])
def test_fewer_than_two_are_refused(store: ObstoreStore, keep: int) -> None:
    with pytest.raises(ValueError, match="keep counts versions and is at least 2"):
        WeightPublisher(store, 3, keep)


def test_frozen_weights_stay(store: ObstoreStore) -> None:
    publisher, base = WeightPublisher(store, 3, keep=2), {"f": RawTensor("bfloat16", (2,), np.array([1, 2], np.uint16))}
    made = [WeightSet(w.version, w.tensors, base) for w in versions(9)]
    for old, new in zip([None, *made], made, strict=False):
        publisher.publish(new, old)
        publisher.retire(new.version)
    assert fingerprint(WeightReader(store).read(8)) == fingerprint(made[8])
    assert store.list(VERSIONS)[0].endswith("6")
