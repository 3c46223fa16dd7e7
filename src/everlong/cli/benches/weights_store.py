"""A given store against a folder: the time that a trainer waits to publish and an engine to read."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Callable
from itertools import count

from everlong.cli.bench import Row
from everlong.cli.benches.timing import interleaved
from everlong.storage import ObstoreStore, open_store
from everlong.weights import WeightPublisher, WeightReader, WeightSet


def measure(url: str, old: WeightSet, new: WeightSet) -> list[Row]:
    """`old` is version 0. Everything lies below a name of its own in the store and is deleted at the end."""
    place = f"{url.rstrip('/')}/bench-{secrets.token_hex(8)}"
    store = open_store(place)
    with tempfile.TemporaryDirectory() as folder:
        try:
            ours, reference = _Side(store, old, new), _Side(open_store(folder), old, new)
            return [
                _row("create 100 bytes", "create_s", ours.create, reference.create),
                _row(
                    f"anchor of {ours.anchor_bytes} bytes", "publish_s", ours.publish_anchor, reference.publish_anchor
                ),
                _row(f"anchor of {ours.anchor_bytes} bytes", "read_s", ours.read_anchor, reference.read_anchor),
                _row(f"delta of {ours.delta_bytes} bytes", "publish_s", ours.publish_delta, reference.publish_delta),
                _row(f"delta of {ours.delta_bytes} bytes", "read_s", ours.read_delta, reference.read_delta),
            ]
        finally:
            for key in store.list():
                store.delete(key)


class _Side:
    """What is done to one store, each time under a number that is free."""

    def __init__(self, store: ObstoreStore, old: WeightSet, new: WeightSet) -> None:
        self._store, self._old, self._new, self._numbers = store, old, new, count(2)
        self._publisher, self._reader = WeightPublisher(store, anchor_every=10), WeightReader(store)
        self.anchor_bytes = self._publisher.publish(old, None).size_bytes
        self.delta_bytes = self._publisher.publish(WeightSet(1, new.tensors), old).size_bytes

    def create(self) -> None:
        self._store.create(f"small/{next(self._numbers)}", bytes(100))

    def publish_anchor(self) -> None:
        self._publisher.publish(WeightSet(next(self._numbers), self._old.tensors), None)

    def publish_delta(self) -> None:
        self._publisher.publish(WeightSet(next(self._numbers), self._new.tensors), self._old)

    def read_anchor(self) -> None:
        self._reader.read(0)

    def read_delta(self) -> None:
        self._reader.read(1, self._old)


def _row(case: str, metric: str, ours: Callable[[], None], reference: Callable[[], None]) -> Row:
    seconds, of_folder = interleaved(ours, reference)
    return Row(f"store, {case}", metric, "s", seconds, "a folder", of_folder, of_folder / seconds)
