"""The control process needs no torch: every command and a whole scripted run in an environment without it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("EVERLONG_CORE_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="EVERLONG_CORE_PYTHON is unset: `make loop` builds that environment and sets it"
)
COMMANDS = (
    "", "train", "resume", "eval", "serve", "view", "report", "bench", "tasks", "tasks make", "tasks check", "tasks show",
    "ledger", "ledger check",
)  # fmt: skip
TINY = """
    --model.type scripted --warmup.num-batches 1 --warmup.traces-per-batch 2 --schedule.num-batches 2
    --schedule.groups-per-batch 2 --schedule.group-size 4 --observe.progress none
"""


def everlong(*arguments: str | Path, cwd: Path) -> str:
    """What the command printed; it must succeed."""
    code = "from everlong.cli.main import main; main()"
    command = [PYTHON, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_this_environment_has_neither_torch_nor_transformers() -> None:
    for name in ("torch", "transformers"):
        done = subprocess.run([PYTHON, "-c", f"import {name}"], capture_output=True, text=True)
        assert f"No module named '{name}'" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_no_torch(command: str, tmp_path: Path) -> None:
    assert "usage" in everlong(*command.split(), "--help", cwd=tmp_path).lower()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for split in ("train", "eval"):
        made = f"tasks make terminal --count 3 --out {split} --split {split} --kinds write-word"
        everlong(*made.split(), cwd=folder)
    return folder


def test_tasks_are_made_checked_and_shown_without_torch(tasks: Path) -> None:
    assert "3 of 3 tasks are proven" in everlong("tasks", "check", "train", "--repeats", "1", cwd=tasks)
    first = min((tasks / "train").iterdir())
    assert "Write the word" in everlong("tasks", "show", first, cwd=tasks)


@pytest.mark.parametrize("worker", ["process", "inline"])
def test_a_scripted_run_ends_and_balances_without_torch(worker: str, tasks: Path, tmp_path: Path) -> None:
    named = ["--tasks.train", tasks / "train", "--tasks.eval", tasks / "eval"]
    everlong("train", *TINY.split(), *named, "--worker", worker, "--output", "run", cwd=tmp_path)
    assert "balances" in everlong("ledger", "check", "run", cwd=tmp_path)
    assert "train-000000-000" in everlong("view", "run", cwd=tmp_path)
    assert "turn 0" in everlong("view", "run", "train-000000-000", cwd=tmp_path)
    assert "report" in everlong("report", "run", cwd=tmp_path)
    everlong("resume", "run", cwd=tmp_path)
    everlong("eval", "run", "--json", "figures.json", cwd=tmp_path)
    assert '"episodes": 3' in (tmp_path / "figures.json").read_text()
