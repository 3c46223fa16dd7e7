"""The benchmarks that need no engine, run whole: they write the one form, and their ratios say what they claim."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from everlong.cli.bench import bench_command
from everlong.cli.benches import agent_trees
from everlong.cli.benches.agent_trees import draw_shapes, read_shapes
from everlong.cli.benches.trainer import HeadSize, chunked_head, flattened, large_tree, packed, tree_against_flat
from everlong.storage import open_store

LOWER_IS_BETTER = {"bytes", "s"}


@pytest.mark.parametrize(("name", "store"), [("ledger", None), ("weights", None), ("weights", "store")])
def test_a_bench_writes_rows_whose_ratio_above_one_is_better(
    name: str, store: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its lock is this test's own
    url = None if store is None else str(tmp_path / store)
    bench_command(name, tmp_path / "figures.json", url)
    written = json.loads((tmp_path / "figures.json").read_text())
    assert written.keys() == {"bench", "rows"} and written["bench"] == name and written["rows"]
    for row in written["rows"]:
        assert row.keys() == {"case", "metric", "unit", "value", "reference", "reference_value", "ratio"}
        ours, reference = row["value"], row["reference_value"]
        better = reference / ours if row["unit"] in LOWER_IS_BETTER else ours / reference
        assert row["ratio"] == pytest.approx(better)
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
