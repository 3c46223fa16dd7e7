"""Size and speed of a delta between two policies, against plain codings, the entropy bound and copying the weights.

`real` are successive policies of a run (`--run`), the newest of its published versions. `synthetic-P` are 16M bfloat16 values
of standard deviation 0.02 whose float32 masters all moved by one learning rate up or down, so that P percent of them changed;
what training changes may be less even. Size is that of everything that is sent, the manifest among it. Speeds are dense
bytes per second of processor time in one thread: `encode` and `apply` are the codec's, apply with the checksum of what came
out; `publish` and `read` are all that happens between the weights in memory and the store. `pause` is how long a serving
engine, SmolLM2-135M, computes no token while it takes up a version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from everlong.cli.bench import Row
from everlong.cli.benches import delta_pause, delta_speed
from everlong.cli.benches.delta_references import entropy_bound, index_value, xor_zstd
from everlong.cli.run_folder import RunFolder
from everlong.storage import open_store
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet
from everlong.weights.manifest import version_key

NUM_VALUES, TENSOR_VALUES = 1 << 24, 1 << 20
SYNTHETIC = {"synthetic-1": 0.01, "synthetic-2": 0.02, "synthetic-8": 0.08, "synthetic-30": 0.30}
REAL, PAUSE = "real", "pause"
CASES = (REAL, *SYNTHETIC, PAUSE)
MOST_PAIRS = 5
"""Of a run, the newest."""


def measure(run: Path | None = None, cases: Sequence[str] = ()) -> list[Row]:
    """Without `cases` all of them, `real` where a run is given. Raises ValueError for an unknown one, for `real` without a run and
    for a run that holds fewer than two versions."""
    cases = cases or [case for case in CASES if case != REAL or run is not None]
    if unknown := [case for case in cases if case not in CASES]:
        raise ValueError(f"bench delta has no case {unknown[0]!r}: there are {', '.join(CASES)}")
    if (REAL in cases) != (run is not None):
        raise ValueError(f"case {REAL} measures the policies of a run: give both --run and that case, or neither")
    rows: list[Row] = []
    for case in cases:
        if case == PAUSE:
            rows += delta_pause.measure()
        elif case == REAL:
            assert run is not None
            for old, new in _real(run):
                rows += _case(case, old, new)
        else:
            rows += _case(case, *synthetic(SYNTHETIC[case], NUM_VALUES))
    return rows


def synthetic(share: float, num_values: int) -> tuple[WeightSet, WeightSet]:
    """Two policies of which so large a share differs, within a few percent of it."""
    rng = np.random.default_rng(0)
    master_N = rng.normal(0, 0.02, num_values).astype(np.float32)
    signs_N = rng.choice(np.array([-1, 1], np.float32), num_values)
    sample, low, high = slice(1 << 18), 1e-8, 1e-2
    for _ in range(24):
        rate = np.float32(np.sqrt(low * high))
        changed = np.mean(rounded(master_N[sample]) != rounded(master_N[sample] + rate * signs_N[sample]))
        low, high = (float(rate), high) if changed < share else (low, float(rate))
    return _weights(0, rounded(master_N)), _weights(1, rounded(master_N + rate * signs_N))


def rounded(values_N: np.ndarray) -> np.ndarray:
    """float32 to the bits of the nearest bfloat16, ties to even."""
    bits_N = values_N.view(np.uint32)
    return ((bits_N + 0x7FFF + ((bits_N >> 16) & 1)) >> 16).astype(np.uint16)


def _weights(version: int, bits_N: np.ndarray) -> WeightSet:
    parts = bits_N.reshape(-1, min(TENSOR_VALUES, bits_N.size))
    return WeightSet(version, {f"w.{i}": RawTensor("bfloat16", part.shape, part) for i, part in enumerate(parts)})


def _real(run: Path) -> Iterator[tuple[WeightSet, WeightSet]]:
    """Raises ValueError where the run has published fewer than two versions."""
    folder = RunFolder(run)
    reader = WeightReader(open_store(folder.store_url(folder.read_config())))
    pairs = list(pairwise(reader.versions()))[-MOST_PAIRS:]
    if not pairs:
        raise ValueError(
            f"{run} has published {len(reader.versions())} versions, and a delta lies between two: train more"
        )
    old: WeightSet | None = None
    for before, after in pairs:
        old = reader.read(before, old)
        yield old, reader.read(after, old)


def _case(name: str, old: WeightSet, new: WeightSet) -> list[Row]:
    store = open_store("memory://")
    publisher = WeightPublisher(store, anchor_every=10)
    publisher.publish(old, None)
    published = publisher.publish(new, old)
    manifest = store.get(version_key(new.version))
    versions = f" {old.version} to {new.version}" if name == REAL else ""
    case = f"{name}{versions}, {published.num_changed / published.num_values:.2%} changed"
    pairs = [(old.tensors[name], tensor) for name, tensor in new.tensors.items()]
    references = {
        "full_bf16": sum(2 * after.size for _, after in pairs),
        "xor_zstd": sum(len(xor_zstd(before, after)) for before, after in pairs),
        "index_value": sum(len(index_value(before, after)) for before, after in pairs),
        "entropy_bound": sum(entropy_bound(before, after) for before, after in pairs) / 8,
    }
    ours = float(published.size_bytes + len(manifest))
    sizes = [
        Row(case, "size", "bytes", ours, reference, float(size), size / ours) for reference, size in references.items()
    ]
    return sizes + delta_speed.measure(case, store, old, new)
