"""What a benchmark writes, and that one runs at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from everlong.cli.bench import Row, bench_command, figures, only_one


def test_figures_have_the_one_form() -> None:
    row = Row("16 requests", "tokens_per_s", "1/s", 300.0, "one at a time", 100.0, 3.0)
    written = json.loads(json.dumps(figures("engine", [row])))
    assert written == {
        "bench": "engine",
        "rows": [
            {
                "case": "16 requests",
                "metric": "tokens_per_s",
                "unit": "1/s",
                "value": 300.0,
                "reference": "one at a time",
                "reference_value": 100.0,
                "ratio": 3.0,
            }
        ],
    }


def test_a_second_bench_is_refused_while_one_runs(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with (
        only_one(lock),
        pytest.raises(OSError, match=f"another bench runs on this machine and holds {lock}"),
        only_one(lock),
    ):
        pass  # pragma: no cover
    with only_one(lock):
        """Free again."""


@pytest.mark.parametrize("name", ["ledger", ""])
def test_a_store_is_refused_by_a_bench_that_would_not_use_it(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"bench {name or 'without a name'} uses no store, got --store s3://bucket/path"
    ):
        bench_command(name, None, "s3://bucket/path")
