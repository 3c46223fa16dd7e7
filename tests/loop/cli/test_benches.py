"""The benchmarks that need no engine, run whole: they write the one form, and their ratios say what they claim."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from everlong.cli.bench import bench_command
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
