"""The benchmarks that need no engine, run whole: they write the one form, and their ratios say what they claim."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest

from everlong.cli.bench import bench_command
from everlong.cli.benches import agent_trees, delta, delta_speed
from everlong.cli.benches.agent_trees import draw_shapes, read_shapes
from everlong.cli.benches.trainer import HeadSize, chunked_head, flattened, large_tree, packed, tree_against_flat
from everlong.cli.config import RunConfig
from everlong.cli.run_folder import RunFolder
from everlong.storage import open_store
from everlong.weights import RawTensor, WeightPublisher, WeightSet

LOWER_IS_BETTER = {"bytes", "s"}


SIZE_REFERENCES = ["full_bf16", "xor_zstd", "index_value", "entropy_bound"]


def drifting(count: int) -> list[WeightSet]:
    rng = np.random.default_rng(0)
    bits, versions = rng.integers(0x3A00, 0x3E00, (64, 256)).astype(np.uint16), []
    for number in range(count):
        bits = bits + (rng.random(bits.shape) < 0.01).astype(np.uint16)
        versions.append(WeightSet(number, {"w": RawTensor("bfloat16", bits.shape, bits)}))
    return versions


def check(rows: list[dict]) -> None:
    """They are of the one form, and what a ratio says is true."""
    assert rows
    for row in rows:
        assert row.keys() == {"case", "metric", "unit", "value", "reference", "reference_value", "ratio"}
        ours, reference = row["value"], row["reference_value"]
        better = reference / ours if row["unit"] in LOWER_IS_BETTER else ours / reference
        assert row["ratio"] == pytest.approx(better)


def sizes(rows: list[dict], case: str) -> dict[str, float]:
    return {row["reference"]: row["ratio"] for row in rows if row["metric"] == "size" and row["case"].startswith(case)}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run that has published three policies."""
    folder, config = RunFolder(tmp_path / "run"), RunConfig(output=tmp_path / "run")
    folder.create(config)
    publisher, versions = WeightPublisher(open_store(folder.store_url(config)), 10), drifting(3)
    for base, weights in zip([None, *versions], versions, strict=False):
        publisher.publish(weights, base)
    return folder.path


def test_bench_delta_measures_the_policies_of_a_run_and_made_up_ones(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(delta, "NUM_VALUES", 1 << 18)
    monkeypatch.setattr(delta_speed, "REPEATS", 1)
    bench_command("delta", tmp_path / "figures.json", None, run_folder, ("real", "synthetic-1", "synthetic-30"))
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    check(rows)
    for case in ("real 0 to 1, ", "real 1 to 2, ", "synthetic-1, ", "synthetic-30, "):
        assert list(sizes(rows, case)) == SIZE_REFERENCES
    assert sizes(rows, "synthetic-1, ")["full_bf16"] > 100 > sizes(rows, "synthetic-30, ")["full_bf16"]
    assert all(sizes(rows, "synthetic-30, ")[other] > 1.5 for other in ("xor_zstd", "index_value"))
    assert 0.85 < sizes(rows, "synthetic-30, ")["entropy_bound"] < 1
    speeds = {row["metric"] for row in rows if row["unit"] == "GB/cpu s"}
    assert speeds == {"encode", "apply", "publish", "read"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cases": ("real",)}, "give both --run and that case, or neither"),
        ({"cases": ("synthetic-3",)}, "no case 'synthetic-3': there are real, synthetic-1"),
        ({"store": "memory://"}, "bench delta uses no store, got --store memory://: leave it out, or measure weights"),
    ],
)
def test_bench_delta_refuses_what_it_would_not_measure(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench_command("delta", None, **options)


@pytest.mark.parametrize("options", [{"run": Path("run")}, {"cases": ("real",)}])
def test_other_benches_refuse_the_options_of_delta(options: dict) -> None:
    with pytest.raises(ValueError, match="leave it out, or measure delta"):
        bench_command("ledger", None, **options)


def test_bench_delta_needs_two_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = RunFolder(tmp_path / "young")
    folder.create(RunConfig(output=folder.path))
    with pytest.raises(ValueError, match="has published 0 versions, and a delta lies between two"):
        bench_command("delta", None, run=folder.path, cases=("real",))


@pytest.mark.parametrize(("name", "store"), [("ledger", None), ("weights", None), ("weights", "store")])
def test_a_bench_writes_rows_whose_ratio_above_one_is_better(
    name: str, store: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its lock is this test's own
    url = None if store is None else str(tmp_path / store)
    bench_command(name, tmp_path / "figures.json", url)
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written.keys() == {"bench", "rows"} and written["bench"] == name
    check(written["rows"])
    measured_store = [row["case"] for row in written["rows"] if row["case"].startswith("store, ")]
    assert len(measured_store) == (0 if url is None else 5)
    assert url is None or open_store(url).list("") == [], "it leaves nothing"
    assert "a ratio above 1 is better" in " ".join(capsys.readouterr().out.split())


def test_the_committed_trees_are_those_that_the_generator_draws_and_overlap_as_they_are_named() -> None:
    assert read_shapes() == draw_shapes()
    for name, shape in read_shapes().items():
        group = agent_trees.group_of(0, shape, 260)
        tree, flat = (sum(len(m.columns) for m in batch.micro_batches) for batch in (packed(group), flattened(group)))
        assert 1 - tree / flat == pytest.approx(float(name.removeprefix("tree-")), abs=0.03)


def test_the_cases_of_the_trainer_at_a_small_size() -> None:
    """A tree's gradient is compared with its branches' before either is timed."""
    rows = chunked_head(HeadSize(num_tokens=64, vocab_size=50_000, width=8, chunk_tokens=8), repeats=1)
    time, memory = rows
    assert (time.case, time.metric, time.reference) == ("chunked_head", "time", "plain")
    assert (memory.metric, memory.unit) == ("peak_memory", "bytes")
    assert 0 < memory.value < memory.reference_value
    shape = read_shapes()["tree-0.8"]
    shape = agent_trees.GroupShape(shape.prompt, (shape.episodes[0][:4],))
    time, tokens = tree_against_flat("tree-small", shape, width=64, repeats=1)
    assert time.value > 0 and tokens.ratio == tokens.reference_value / tokens.value > 2
    speed, memory = large_tree(1500, pass_tokens=512)
    assert speed.case == "tree-1k" and speed.value > 0
    assert memory.reference == "bound" and 0 < memory.value < memory.reference_value
