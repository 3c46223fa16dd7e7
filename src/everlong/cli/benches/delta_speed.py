"""Dense bytes per second of processor time that a delta is coded, applied, published and read with."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

import numpy as np
import zstandard

from everlong.cli.bench import Row
from everlong.cli.benches.delta_references import xor_zstd
from everlong.cli.benches.timing import interleaved
from everlong.contracts.ports import ObjectStore
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet
from everlong.weights.choice import encode_tensor
from everlong.weights.reader import read_tensor

REPEATS = 3


def measure(case: str, store: ObjectStore, old: WeightSet, new: WeightSet) -> list[Row]:
    """`store` holds both versions."""
    sides = _Sides(store, old, new)
    dense = sum(tensor.bits.nbytes for tensor in new.tensors.values()) / 1e9
    measured: list[tuple[str, Callable[[], object], str, Callable[[], object]]] = [
        ("encode", sides.encode, "xor_zstd", sides.encode_xor),
        ("encode", sides.encode, "comparing", sides.compare),
        ("apply", sides.apply, "xor_zstd", sides.apply_xor),
        ("apply", sides.apply, "copying", sides.copy),
        ("publish", sides.publish, "comparing", sides.compare),
        ("read", sides.read, "copying", sides.copy),
    ]
    rows = []
    for metric, ours, reference, theirs in measured:
        seconds = interleaved(ours, theirs, repeats=REPEATS, clock=time.process_time)
        speed, other = (dense / max(spent, 1e-9) for spent in seconds)
        rows.append(Row(case, metric, "GB/cpu s", speed, reference, other, speed / other))
    return rows


class _Sides:
    def __init__(self, store: ObjectStore, old: WeightSet, new: WeightSet) -> None:
        self._old, self._new = old, new
        self._publisher, self._reader = WeightPublisher(store, anchor_every=1 << 30), WeightReader(store)
        self._numbers = count(new.version + 1)
        self._pairs = [(name, old.tensors[name], tensor) for name, tensor in sorted(new.tensors.items())]
        self._checksums = {name: tensor.checksum() for name, tensor in new.tensors.items()}
        self._coded = [self._encode(*pair) for pair in self._pairs]
        self._xored = [xor_zstd(before, after) for _, before, after in self._pairs]

    def _encode(self, name: str, before: RawTensor, after: RawTensor) -> tuple:
        return encode_tensor(name, after, before, False, self._checksums[name])

    def encode(self) -> None:
        for pair in self._pairs:
            self._encode(*pair)

    def apply(self) -> None:
        """With the checksum of what came out."""
        for entry, payload in self._coded:
            read_tensor(entry, memoryview(payload), self._old, self._new.version)

    def publish(self) -> None:
        self._publisher.publish(WeightSet(next(self._numbers), self._new.tensors), self._old)

    def read(self) -> None:
        self._reader.read(self._new.version, self._old)

    def encode_xor(self) -> None:
        for _, before, after in self._pairs:
            xor_zstd(before, after)

    def apply_xor(self) -> None:
        """With the checksum, too."""
        for (_, before, after), payload in zip(self._pairs, self._xored, strict=True):
            raw = np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), before.bits.dtype)
            bits = (before.flat() ^ raw).reshape(after.shape)
            RawTensor(after.dtype, after.shape, bits).checksum()

    def copy(self) -> None:
        for _, before, _ in self._pairs:
            before.flat().copy()

    def compare(self) -> None:
        for _, before, after in self._pairs:
            np.count_nonzero(before.bits != after.bits)
