"""Versions of adapters: the frozen weights lie in the store once, and nothing is used that is not the whole of both."""

import numpy as np
import pytest

from everlong.contracts.errors import StoreError
from everlong.storage import open_store
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet, fingerprint
from everlong.weights.manifest import FROZEN, SHARDS, load_frozen_manifest, load_manifest


def bf16(*bits):
    return RawTensor("bfloat16", (len(bits),), np.array(bits, np.uint16))


BASE = {"w": RawTensor("bfloat16", (40, 50), np.random.default_rng(0).integers(0, 0x7000, (40, 50)).astype(np.uint16))}


def version(number, base=BASE):
    return WeightSet(number, {"w.lora_B": bf16(0x3F80 + number, 0xC000, 0x3F00)}, base)


@pytest.fixture
def store():
    store = open_store("memory://")
    publisher = WeightPublisher(store, 3)
    for number in range(8):
        publisher.publish(version(number), version(number - 1) if number else None)
    return store


def same(one, other):
    return fingerprint(one) == fingerprint(other) and one.version == other.version


def test_versions_hold_adapters_alone_anchors_too(store):
    manifests = [load_manifest(store, number) for number in range(8)]
    assert [manifest.base_version is None for manifest in manifests] == [n % 3 == 0 for n in range(8)]
    assert {tuple(entry.name for entry in manifest.tensors) for manifest in manifests} == {("w.lora_B",)}
    assert {manifest.frozen for manifest in manifests} == {fingerprint(BASE)}
    assert all(manifest.published.size_bytes < 60 < BASE["w"].bits.nbytes for manifest in manifests)
    assert len(store.list(FROZEN)) == 1


def test_every_version_is_read_with_what_it_stands_on(store):
    reader, held = WeightReader(store), None
    for number in range(8):
        read = reader.read(number, held)
        assert same(read, version(number)) and same(reader.read(number), version(number))
        assert held is None or read.frozen is held.frozen, "handed on, not read again"
        assert fingerprint(read) == reader.manifest(number).fingerprint
        held = read


def test_the_fingerprint_covers_adapters_and_frozen_weights():
    other = {"w": RawTensor("bfloat16", (40, 50), BASE["w"].bits ^ 1)}
    assert len({fingerprint(version(0)), fingerprint(version(1)), fingerprint(version(0, other))}) == 3


def test_a_reader_without_the_frozen_weights_fails_and_says_what_is_missing(store):
    held = WeightReader(store).read(4)
    store.delete(FROZEN + fingerprint(BASE))
    with pytest.raises(StoreError, match=f"version 6 holds adapters alone, and the frozen weights {fingerprint(BASE)}"):
        WeightReader(store).read(6)
    assert same(WeightReader(store).read(6, held), version(6)), "whoever holds them needs no store for it"


def test_frozen_weights_that_are_others_are_never_used(store):
    held = WeightReader(store).read(4)
    held.frozen["w"].bits[0, 0] ^= 1
    assert same(WeightReader(store).read(5, held), version(5)), "read again out of the store"
    shard = load_frozen_manifest(store, 5, fingerprint(BASE)).shards[0]
    store.put(shard.key, store.get(shard.key)[:-1] + b"x")
    with pytest.raises(StoreError, match=f"shard {SHARDS}.* is damaged"):
        WeightReader(store).read(5)


def test_other_frozen_weights_under_the_same_adapters_are_another_version(store):
    other = {"w": RawTensor("bfloat16", (40, 50), BASE["w"].bits ^ 1)}
    WeightPublisher(store, 3).publish(version(8, other), version(7))
    assert same(WeightReader(store).read(8, version(7)), version(8, other))
    assert len(store.list(FROZEN)) == 2
