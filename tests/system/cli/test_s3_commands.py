"""Commands on a real S3 server."""

import json
import tempfile
from pathlib import Path

import pytest
from tests.seaweedfs import needs_seaweedfs

from everlong.cli.bench import bench_command
from everlong.cli.main import main
from everlong.storage import open_store

pytestmark = [needs_seaweedfs, pytest.mark.timeout(300)]


def test_a_run_on_a_missing_bucket_ends_before_anything_of_it_exists(
    s3_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "run"
    with pytest.raises(SystemExit) as stopped:
        main(
            ["train", "--output", str(output), "--model.type", "scripted", "--weights.store", "s3://no-such-bucket/run"]
        )
    assert stopped.value.code == 1
    assert "the bucket does not exist there: create it" in " ".join(capsys.readouterr().err.split())
    assert not output.exists()


def test_the_bench_measures_a_bucket_against_a_folder_and_leaves_nothing(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its lock is this test's own
    bench_command("weights", tmp_path / "figures.json", s3_url)
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    stored = [row for row in rows if row["case"].startswith("store, ")]
    assert {row["metric"] for row in stored} == {"create_s", "publish_s", "read_s"}
    assert all(row["reference"] == "a folder" and row["value"] > 0 for row in stored)
    assert open_store(s3_url).list("") == []
