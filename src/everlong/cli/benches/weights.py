"""Size of a published version and time to read it: a delta against the whole weights, as anchors travel.

The weights are 4M bfloat16 values of standard deviation 0.02, moved by Adam-like steps of one learning rate on a float32
master; what training really changes may be less even. With a store given, the same through it against a folder.
"""

from __future__ import annotations

import numpy as np

from everlong.cli.bench import Row
from everlong.cli.benches import weights_store
from everlong.cli.benches.timing import interleaved
from everlong.storage import open_store
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet

NUM_VALUES = 1 << 22


def measure(store: str | None = None) -> list[Row]:
    """`store`: URL of the one to measure too."""
    rows = []
    for learning_rate in (1e-6, 5e-6, 3e-5):
        rows += _case(learning_rate)
    return rows if store is None else rows + weights_store.measure(store, *_before_and_after(5e-6))


def _before_and_after(learning_rate: float) -> tuple[WeightSet, WeightSet]:
    rng = np.random.default_rng(0)
    master = rng.normal(0, 0.02, NUM_VALUES).astype(np.float32)
    moved = master + np.float32(learning_rate) * rng.choice([-1, 1], NUM_VALUES).astype(np.float32)
    return _weights(0, master), _weights(1, moved)


def _case(learning_rate: float) -> list[Row]:
    old, new = _before_and_after(learning_rate)
    store = open_store("memory://")
    publisher, reader = WeightPublisher(store, anchor_every=10), WeightReader(store)
    anchor = publisher.publish(old, None)
    delta = publisher.publish(new, old)
    apply, whole = interleaved(lambda: reader.read(1, old), lambda: reader.read(0), repeats=3)
    case = f"lr {learning_rate:g}, {delta.num_changed / delta.num_values:.1%} changed"
    dense = float(NUM_VALUES * 2)
    return [
        Row(case, "size", "bytes", delta.size_bytes, "dense bfloat16", dense, dense / delta.size_bytes),
        Row(case, "size", "bytes", delta.size_bytes, "anchor", anchor.size_bytes, anchor.size_bytes / delta.size_bytes),
        Row(case, "read_s", "s", apply, "reading the anchor", whole, whole / apply),
    ]


def _weights(version: int, values: np.ndarray) -> WeightSet:
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return WeightSet(version, {"w": RawTensor("bfloat16", rounded.shape, rounded)})
