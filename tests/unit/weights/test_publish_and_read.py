"""Versions through the store: what is read equals what was published, or nothing is changed and the error says why."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from everlong.contracts.errors import AlreadyExists, StaleWeights, StoreError
from everlong.storage import ObstoreStore, open_store
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet, fingerprint
from everlong.weights.manifest import SHARDS, VERSIONS, Codec, load_manifest, version_key
from everlong.weights.reader import apply_version
from everlong.weights.tensors import fingerprint_of


@pytest.fixture
def store() -> ObstoreStore:
    return open_store("memory://")


def bf16(*bits: int) -> RawTensor:
    return RawTensor("bfloat16", (len(bits),), np.array(bits, np.uint16))


def version(number: int, *bits: int) -> WeightSet:
    return WeightSet(number, {"w": bf16(*bits)})


def random_versions(count: int, seed: int = 0) -> list[WeightSet]:
    """Weights that drift by a few units in the last place, with a tensor that never changes and one that is redrawn."""
    rng = np.random.default_rng(seed)
    drifting = rng.integers(0x3C00, 0x3E00, (64, 32)).astype(np.uint16)
    frozen = RawTensor("float32", (7,), rng.integers(0, 0x7F800000, 7).astype(np.uint32))
    versions = []
    for number in range(count):
        drifting = drifting + (rng.random(drifting.shape) < 0.05).astype(np.uint16)
        redrawn = rng.integers(0, 0x7F800000, (3, 5)).astype(np.uint32)
        tensors = {
            "drifting": RawTensor("bfloat16", drifting.shape, drifting),
            "frozen": frozen,
            "redrawn": RawTensor("float32", (3, 5), redrawn),
        }
        versions.append(WeightSet(number, tensors))
    return versions


def publish_chain(store: ObstoreStore, versions: list[WeightSet], anchor_every: int = 100) -> None:
    publisher = WeightPublisher(store, anchor_every)
    for base, weights in zip([None, *versions], versions, strict=False):
        publisher.publish(weights, base)


def equal(one: WeightSet, other: WeightSet) -> bool:
    return (
        one.version == other.version
        and one.tensors.keys() == other.tensors.keys()
        and all(np.array_equal(one.tensors[name].bits, other.tensors[name].bits) for name in one.tensors)
    )


def damage(store: ObstoreStore, key: str, change: Callable[[bytes], bytes]) -> None:
    data = store.get(key)
    store.delete(key)
    store.put(key, change(data))


def flip_last(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("anchor_every", [1, 7, 100])
def test_base_plus_deltas_equals_the_checkpoint_over_twenty_versions(store: ObstoreStore, anchor_every: int) -> None:
    versions = random_versions(20)
    publish_chain(store, versions, anchor_every)
    reader, held = WeightReader(store), None
    for weights in versions:
        held = reader.read(weights.version, held)
        assert equal(held, weights)
        assert fingerprint(held) == reader.manifest(weights.version).fingerprint
        assert equal(reader.read(weights.version), weights)


def test_one_change_of_three_is_published_as_such(store: ObstoreStore) -> None:
    old, new = version(0, 0x3F80, 0xC000, 0x3F00), version(1, 0x3F80, 0xC001, 0x3F00)
    publisher = WeightPublisher(store, 10)
    publisher.publish(old, None)
    published = publisher.publish(new, old)
    assert (published.base_version, published.num_changed, published.num_values) == (0, 1, 3)


def test_version_without_a_visible_change_says_so_and_has_no_payload(store: ObstoreStore) -> None:
    publisher = WeightPublisher(store, 10)
    publisher.publish(version(0, 0x3C9C), None)
    published = publisher.publish(version(1, 0x3C9C), version(0, 0x3C9C))
    assert (published.num_changed, published.size_bytes) == (0, 0)
    assert WeightReader(store).read(1).tensors["w"].bits.tolist() == [0x3C9C]


def test_anchor_comes_every_n_versions_and_without_base(store: ObstoreStore) -> None:
    publish_chain(store, random_versions(7), anchor_every=3)
    bases = [WeightReader(store).manifest(number).base_version for number in range(7)]
    assert bases == [None, 0, 1, None, 3, 4, None]


def test_codec_is_chosen_per_tensor(store: ObstoreStore) -> None:
    publish_chain(store, random_versions(2))
    manifest = load_manifest(store, 1)
    assert manifest is not None
    codecs = {entry.name: entry.codec for entry in manifest.tensors}
    assert codecs == {"drifting": Codec.SPARSE, "frozen": Codec.SAME, "redrawn": Codec.FULL}


def test_minus_zero_subnormals_and_infinities_arrive_exactly(store: ObstoreStore) -> None:
    old = version(0, 0x0000, 0x3F80, 0x0001, 0x7F80, 0x4000)
    new = version(1, 0x8000, 0xFF80, 0x0000, 0x7F80, 0x4000)
    publish_chain(store, [old, new])
    assert equal(WeightReader(store).read(1, old), new)


def test_nan_is_refused_by_the_name_of_its_tensor_and_nothing_is_written(store: ObstoreStore) -> None:
    weights = WeightSet(0, {"layers.0.fine": bf16(0x3F80), "layers.1.broken": bf16(0x3F80, 0x7FC1)})
    with pytest.raises(ValueError, match=r"tensor layers\.1\.broken of version 0 holds a NaN"):
        WeightPublisher(store, 10).publish(weights, None)
    assert store.list("") == []


def test_fused_experts_and_their_pieces_give_the_same_bits(store: ObstoreStore) -> None:
    rng = np.random.default_rng(1)
    old_E22, new_E22 = (rng.integers(0, 0x7F80, (4, 2, 2)).astype(np.uint16) for _ in range(2))

    def pieces(number: int, bits_E22: np.ndarray) -> WeightSet:
        return WeightSet(number, {f"e.{i}": RawTensor("bfloat16", (2, 2), bits_E22[i]) for i in range(4)})

    def fused(number: int, bits_E22: np.ndarray) -> WeightSet:
        return WeightSet(number, {"e": RawTensor("bfloat16", (4, 2, 2), bits_E22)})

    apart, together = open_store("memory://"), store
    publish_chain(apart, [pieces(0, old_E22), pieces(1, new_E22)])
    publish_chain(together, [fused(0, old_E22), fused(1, new_E22)])
    read = WeightReader(apart).read(1)
    stacked = np.stack([read.tensors[f"e.{i}"].bits for i in range(4)])
    assert np.array_equal(stacked, WeightReader(together).read(1).tensors["e"].bits)


def test_publishing_the_same_again_returns_the_first(store: ObstoreStore) -> None:
    first, second = random_versions(2)
    publisher = WeightPublisher(store, 10)
    publisher.publish(first, None)
    published = publisher.publish(second, first)
    keys = store.list("")
    assert publisher.publish(second, first) == published
    assert WeightPublisher(store, 10).publish(second, None) == published
    assert store.list("") == keys


def test_publishing_other_weights_under_a_taken_version_is_refused(store: ObstoreStore) -> None:
    publisher = WeightPublisher(store, 10)
    publisher.publish(version(3, 1, 2), None)
    with pytest.raises(AlreadyExists, match="version 3 is published with fingerprint .* give the run its own store"):
        publisher.publish(version(3, 1, 3), None)
    assert WeightReader(store).read(3).tensors["w"].bits.tolist() == [1, 2]


def test_base_that_is_not_published_is_refused(store: ObstoreStore) -> None:
    with pytest.raises(ValueError, match="delta 8 needs base 7, which is not published"):
        WeightPublisher(store, 10).publish(version(8, 1), version(7, 1))


def test_base_that_was_written_to_since_is_refused(store: ObstoreStore) -> None:
    live = version(0, 1, 2, 3)
    publisher = WeightPublisher(store, 10)
    publisher.publish(live, None)
    live.tensors["w"].bits[0] = 9
    with pytest.raises(ValueError, match="base 0 is not what was published.*hand over copies"):
        publisher.publish(version(1, 9, 2, 4), live)


@pytest.mark.parametrize("number", [True, -1, "2.10", 1.0])
def test_versions_are_integers(number: object) -> None:
    with pytest.raises(ValueError, match="an integer from 0"):
        WeightSet(number, {})  # type: ignore[arg-type]


def test_latest_compares_numbers_not_text(store: ObstoreStore) -> None:
    reader = WeightReader(store)
    assert reader.latest() is None
    for number in (9, 10, 2, 100_000_000, 99_999_999):
        WeightPublisher(store, 1).publish(version(number, 1), None)
    assert reader.latest() == 100_000_000


def test_manifest_comes_last(store: ObstoreStore) -> None:
    """A publisher that dies before its last step leaves shards and no version."""

    class Dies(Exception):
        pass

    class DyingStore(ObstoreStore):
        def create(self, key: str, data: bytes) -> None:
            raise Dies(key)

    dying = DyingStore(store._client, "dying")
    with pytest.raises(Dies, match=version_key(0)):
        WeightPublisher(dying, 10).publish(version(0, 1, 2), None)
    assert store.list(VERSIONS) == [] and len(store.list(SHARDS)) == 1
    assert WeightPublisher(store, 10).publish(version(0, 1, 2), None).version == 0


def test_two_publishers_of_the_same_bits_agree(store: ObstoreStore) -> None:
    """The second finds the key taken only at the commit, as when the reply to its first try was lost."""

    class LateStore(ObstoreStore):
        def create(self, key: str, data: bytes) -> None:
            store.create(key, data)
            super().create(key, data)

    late = LateStore(store._client, "late")
    published = WeightPublisher(late, 10).publish(version(0, 1, 2), None)
    assert published == WeightReader(store).manifest(0)


def test_reader_takes_deltas_from_what_it_has_and_never_touches_it(store: ObstoreStore) -> None:
    versions = random_versions(6)
    publish_chain(store, versions)
    have = WeightReader(store).read(3)
    before = {name: tensor.bits.copy() for name, tensor in have.tensors.items()}
    shard = load_manifest(store, 2).shards[0].key  # type: ignore[union-attr]
    store.delete(shard)  # not needed on the way from 3 to 5
    read = WeightReader(store).read(5, have)
    assert equal(read, versions[5])
    assert all(np.array_equal(have.tensors[name].bits, bits) for name, bits in before.items())
    assert have.version == 3 and read.tensors["frozen"] is have.tensors["frozen"]


def test_reader_goes_back_to_an_older_version_through_its_anchor(store: ObstoreStore) -> None:
    versions = random_versions(6)
    publish_chain(store, versions, anchor_every=2)
    assert equal(WeightReader(store).read(3, versions[5]), versions[3])


def test_nearer_anchor_is_taken_instead_of_many_deltas(store: ObstoreStore) -> None:
    versions = random_versions(6)
    publish_chain(store, versions, anchor_every=4)
    for number in (1, 2, 3):
        store.delete(version_key(number))
    assert equal(WeightReader(store).read(5, versions[0]), versions[5])


def test_missing_link_is_stale_weights_with_both_versions(store: ObstoreStore) -> None:
    versions = random_versions(9)
    publish_chain(store, versions)
    store.delete(version_key(7))
    with pytest.raises(StaleWeights, match=r"delta 8 needs base 7, engine is at 5: version 7 is not in the store"):
        WeightReader(store).read(8, versions[5])


def test_unpublished_version_is_stale_weights(store: ObstoreStore) -> None:
    with pytest.raises(StaleWeights, match="version 4 is not published: nothing is yet"):
        WeightReader(store).read(4)
    publish_chain(store, random_versions(3))
    with pytest.raises(StaleWeights, match="version 4 is not published: the newest in the store is 2"):
        WeightReader(store).manifest(4)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (5, "delta 8 needs base 7, engine is at 5: pull 6 and 7 first"),
        (3, "delta 8 needs base 7, engine is at 3: pull 4 to 7 first"),
        (8, "delta 8 needs base 7, engine is at 8: read version 7 from its anchor first"),
        (None, "delta 8 needs base 7, engine holds none: read version 7 from its anchor first"),
    ],
    ids=["skipped-two", "skipped-many", "applied-twice", "empty"],
)
def test_delta_out_of_order_or_twice_is_refused(store: ObstoreStore, at: int | None, message: str) -> None:
    versions = random_versions(9)
    publish_chain(store, versions)
    manifest = load_manifest(store, 8)
    assert manifest is not None
    shards = [store.get(shard.key) for shard in manifest.shards]
    with pytest.raises(StaleWeights, match=message):
        apply_version(manifest, None if at is None else versions[at], shards)


def test_wrong_bits_under_the_right_version_fail_after_apply(store: ObstoreStore) -> None:
    """An engine that kept old values under a new number must not go on: it would be wrong for ever."""
    rest = np.random.default_rng(0).integers(0, 0x7F80, 400).tolist()
    zeros, first, second = (version(n, *head, *rest) for n, head in enumerate([(0, 0), (1, 0), (1, 2)]))
    publish_chain(store, [zeros, first, second])
    failed = WeightSet(1, zeros.tensors)
    with pytest.raises(StoreError, match="tensor w of version 2 has checksum .* after apply"):
        WeightReader(store).read(2, failed)
    assert WeightReader(store).read(2).tensors["w"].bits[:2].tolist() == [1, 2]


def test_same_number_with_other_bits_is_read_anew(store: ObstoreStore) -> None:
    publish_chain(store, [version(0, 1, 2)])
    assert WeightReader(store).read(0, version(0, 1, 3)).tensors["w"].bits.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [(flip_last, "is damaged"), (lambda data: data[:-3], "is damaged"), (None, "lost its shard")],
    ids=["flipped-bit", "cut", "lost"],
)
def test_bad_shard_is_a_clear_error_and_leaves_what_the_engine_has(
    store: ObstoreStore, change: Callable[[bytes], bytes] | None, message: str
) -> None:
    versions = random_versions(3)
    publish_chain(store, versions)
    have = WeightReader(store).read(1)
    before = fingerprint(have)
    key = load_manifest(store, 2).shards[0].key  # type: ignore[union-attr]
    if change is None:
        store.delete(key)
    else:
        damage(store, key, change)
    with pytest.raises(StoreError, match=f"shard.*{message}|{message}"):
        WeightReader(store).read(2, have)
    assert fingerprint(have) == before and have.version == 1


def test_payload_that_decodes_to_something_else_fails_after_apply(store: ObstoreStore) -> None:
    """The wire was fine, the result is not: the checksum is of what will be used."""
    versions = random_versions(2)
    publish_chain(store, versions)
    manifest = load_manifest(store, 1)
    assert manifest is not None
    swapped = msgspec.structs.replace(manifest.tensors[0], checksum="0" * 32)
    tensors = (swapped, *manifest.tensors[1:])
    fingerprint = fingerprint_of({entry.name: entry.checksum for entry in tensors})
    lying = msgspec.structs.replace(manifest, tensors=tensors, fingerprint=fingerprint)
    shards = [store.get(shard.key) for shard in manifest.shards]
    with pytest.raises(StoreError, match="tensor drifting of version 1 has checksum .* expected 0000"):
        apply_version(lying, versions[0], shards)


def test_manifest_that_contradicts_its_fingerprint_is_refused_before_anything_is_applied(store: ObstoreStore) -> None:
    versions = random_versions(2)
    publish_chain(store, versions)
    manifest = load_manifest(store, 1)
    assert manifest is not None
    with pytest.raises(StoreError, match="manifest of version 1 contradicts its own fingerprint"):
        apply_version(msgspec.structs.replace(manifest, fingerprint="0" * 32), versions[0], [])


def test_damaged_manifest_is_a_store_error(store: ObstoreStore) -> None:
    publish_chain(store, [version(0, 1)])
    damage(store, version_key(0), lambda data: data[:20])
    with pytest.raises(StoreError, match="manifest of version 0 is damaged"):
        WeightReader(store).read(0)


def test_tensors_may_come_go_and_change_their_shape(store: ObstoreStore) -> None:
    old = WeightSet(0, {"a": bf16(1, 2), "b": bf16(3), "c": bf16(4)})
    new = WeightSet(1, {"a": bf16(1, 2, 9), "c": bf16(4), "d": bf16(5)})
    publish_chain(store, [old, new])
    assert equal(WeightReader(store).read(1, old), new)


def test_large_tensors_are_cut_into_several_shards(store: ObstoreStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everlong.weights.publisher.SHARD_BYTES", 1000)
    versions = random_versions(3)
    publish_chain(store, versions, anchor_every=1)
    manifest = load_manifest(store, 2)
    assert manifest is not None and len(manifest.shards) > 1
    assert equal(WeightReader(store).read(2), versions[2])


def test_fingerprint_sees_names_shapes_dtypes_and_every_bit_but_not_the_order() -> None:
    one, two = bf16(1, 2), bf16(3)
    assert fingerprint({"a": one, "b": two}) == fingerprint({"b": two, "a": one})
    others = [
        {"a": one, "c": two},
        {"a": two, "b": one},
        {"a": one, "b": bf16(4)},
        {"a": one},
        {"a": RawTensor("bfloat16", (2, 1), one.bits.reshape(2, 1)), "b": two},
        {"a": RawTensor("float32", (1,), one.bits.view(np.uint32)), "b": two},
    ]
    assert len({fingerprint(tensors) for tensors in [{"a": one, "b": two}, *others]}) == 7


def test_bits_of_another_type_or_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="bfloat16 bits must be uint16"):
        RawTensor("bfloat16", (2,), np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=r"of shape \(3,\)"):
        RawTensor("float32", (3,), np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match="float32 or bfloat16, got float16"):
        RawTensor("float16", (2,), np.zeros(2, np.uint16))  # type: ignore[arg-type]


def test_strided_views_are_read_by_value(store: ObstoreStore) -> None:
    bits = np.arange(12, dtype=np.uint16).reshape(3, 4)
    weights = WeightSet(0, {"w": RawTensor("bfloat16", (4, 3), bits.T)})
    WeightPublisher(store, 1).publish(weights, None)
    assert np.array_equal(WeightReader(store).read(0).tensors["w"].bits, bits.T)
