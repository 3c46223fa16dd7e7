"""Versions pass through memory a little at a time: shards leave when they are full, and come when their tensors are due."""

import threading

import numpy as np
import pytest

from everlong.storage import ObstoreStore, open_store
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet, fingerprint, publisher, reader
from everlong.weights.in_order import in_order
from everlong.weights.manifest import SHARDS, load_manifest


def test_results_come_in_the_order_of_the_arguments_whichever_is_done_first() -> None:
    begun: list[int] = []
    first_may_end = threading.Event()

    def work(number: int) -> int:
        begun.append(number)
        if number == 0:
            first_may_end.wait(10)
        return number * number

    def arguments():
        for number in range(50):
            if number == 3:  # the others are done before the first
                first_may_end.set()
            yield number

    assert list(in_order(work, arguments(), 2)) == [number * number for number in range(50)]
    assert sorted(begun) == list(range(50))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_no_more_than_two_for_each_thread_are_taken_before_a_result_is(num_threads: int) -> None:
    taken: list[int] = []

    def arguments():
        for number in range(100):
            taken.append(number)
            yield number

    results = in_order(lambda number: number, arguments(), num_threads)
    for done, result in enumerate(results):
        assert result == done and len(taken) <= done + 1 + 2 * num_threads


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_first_error_is_raised_where_its_result_would_come(num_threads: int) -> None:
    def work(number: int) -> int:
        if number in (3, 5):
            raise ValueError(f"number {number}")
        return number

    results, taken = in_order(work, range(20), num_threads), []
    with pytest.raises(ValueError, match="number 3"):
        for result in results:
            taken.append(result)
    assert taken == [0, 1, 2]


def versions() -> tuple[WeightSet, WeightSet]:
    rng = np.random.default_rng(0)
    old = {f"w.{i:02d}": rng.integers(0x3A00, 0x3E00, 3000).astype(np.uint16) for i in range(12)}
    new = {name: bits + (rng.random(3000) < 0.2).astype(np.uint16) for name, bits in old.items()}
    first, second = (
        WeightSet(number, {name: RawTensor("bfloat16", (3000,), bits) for name, bits in tensors.items()})
        for number, tensors in enumerate([old, new])
    )
    return first, second


class Watched(ObstoreStore):
    events: list[str]

    def put(self, key: str, data: bytes) -> None:
        if key.startswith(SHARDS):
            self.events.append("put")
        super().put(key, data)

    def get(self, key: str) -> bytes:
        if key.startswith(SHARDS):
            self.events.append("get")
        return super().get(key)


@pytest.mark.parametrize("threads", [1, 2])
def test_shards_are_put_and_fetched_between_the_tensors(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "SHARD_BYTES", 500)
    monkeypatch.setattr(publisher, "threads_for", lambda num_values: threads)
    monkeypatch.setattr(reader, "threads_for", lambda num_values: threads)
    store, (old, new) = Watched(open_store("memory://")._client, "watched"), versions()
    store.events = []
    encode_tensor, read_tensor = publisher.encode_tensor, reader.read_tensor

    def encode(name: str, *arguments):
        store.events.append("encode")
        return encode_tensor(name, *arguments)

    def read(entry, *arguments):
        store.events.append("apply")
        return read_tensor(entry, *arguments)

    monkeypatch.setattr(publisher, "encode_tensor", encode)
    monkeypatch.setattr(reader, "read_tensor", read)
    WeightPublisher(store, 10).publish(old, None)
    store.events.clear()
    WeightPublisher(store, 10).publish(new, old)
    shards = len(load_manifest(store, 1).shards)
    assert shards > 5 and store.events.count("put") == shards
    assert store.events.index("put") < len(store.events) - 1 - store.events[::-1].index("encode")
    store.events.clear()
    assert fingerprint(WeightReader(store).read(1, old)) == fingerprint(new)
    assert store.events.count("get") == shards, "each is fetched once"
    assert store.events.index("apply") < len(store.events) - 1 - store.events[::-1].index("get")
