"""A run means the same from any folder: its tasks and its code are those of where it was started."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from everlong.cli.run_folder import RunFolder
from everlong.environments.tasks.terminal.generate import Split, make_terminal
from everlong.ledger import read_lifecycle
from everlong.observe import read_points

PARTS = '''
import os
import signal
from pathlib import Path

from everlong.contracts.records import Verdict
from everlong.rollouts.harnesses.bash import BashHarness

STOPPED = Path(__file__).with_name("stopped")


async def said(submission):
    return Verdict(reward={reward})


class StopsOnce(BashHarness):
    """Stops its run as a terminal does, the first time."""

    async def run(self, task, session, sandbox):
        if not STOPPED.exists():
            STOPPED.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return await super().run(task, session, sandbox)
'''
RUN = """
output = "run"
model = { type = "scripted" }
tasks = { train = "train", eval = "eval" }
harness = { type = "parts:StopsOnce" }
grading = { type = "parts:said" }
weights = { store = "shared" }
warmup = { num_batches = 0 }
schedule = { num_batches = 1, groups_per_batch = 2, group_size = 2 }
observe = { progress = "none" }
"""


def everlong(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from everlong.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, timeout=240
    )


def fill(folder: Path, seed: int, reward: float) -> Path:
    folder.mkdir()
    (folder / "parts.py").write_text(PARTS.format(reward=reward))
    for split in (Split.TRAIN, Split.EVAL):
        make_terminal(folder / split, 2, seed=seed, split=split, kinds=("write-word",))
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With a run that was stopped before its first episode ended."""
    home = fill(tmp_path / "home", 0, 0.5)
    (home / "run.toml").write_text(RUN)
    stopped = everlong(home, "train", "@", "run.toml")
    assert stopped.returncode == 130, stopped.stderr
    return home


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Another folder, in which everything has the same names and another content."""
    return fill(tmp_path / "elsewhere", 5, 7.0)


def test_a_run_is_resumed_and_evaluated_on_its_own_tasks_from_anywhere(home: Path, elsewhere: Path) -> None:
    resumed = everlong(elsewhere, "resume", "../home/run")
    assert resumed.returncode == 0, resumed.stderr
    lifecycle = read_lifecycle(RunFolder(home / "run").ledger)
    assert lifecycle.finished
    assert {view.reward for view in lifecycle.episodes.values()} == {0.5}, "the reward of its own code"
    assert read_points(home / "run/metrics.jsonl") and not (elsewhere / "shared").exists()

    done = everlong(elsewhere, "eval", "../home/run", "--json", "figures.json")
    assert done.returncode == 0, done.stderr
    figures = json.loads((elsewhere / "figures.json").read_text())
    assert (figures["reward"], figures["success"], figures["tasks"], figures["changed_tasks"]) == (0.5, 0.0, 2, [])
    assert "changed since" not in done.stdout


def test_a_task_that_changed_is_named_and_not_resumed_with(home: Path, elsewhere: Path) -> None:
    first = min((home / "train").iterdir())
    (first / "instruction.md").write_text("Do something else.")
    resumed = everlong(elsewhere, "resume", "../home/run")
    said = " ".join(resumed.stderr.split())
    assert resumed.returncode == 2 and "Traceback" not in said
    assert (
        f"the files of training task terminal/write-word/{int(first.name.rpartition('-')[2])} changed ({first})" in said
    )
    shutil.rmtree(first)
    assert "is gone" in " ".join(everlong(elsewhere, "resume", "../home/run").stderr.split())


def test_an_evaluation_says_which_tasks_changed(home: Path, elsewhere: Path) -> None:
    assert everlong(home, "resume", "run").returncode == 0
    first = min((home / "eval").iterdir())
    (first / "instruction.md").write_text("Do something else.")
    done = everlong(elsewhere, "eval", "../home/run", "--json", "figures.json")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    changed = f"terminal/write-word/{int(first.name.rpartition('-')[2])}"
    assert f"1 of 2 tasks changed since the run started, first {changed}" in said
    assert json.loads((elsewhere / "figures.json").read_text())["changed_tasks"] == [changed]
