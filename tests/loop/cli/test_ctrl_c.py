"""Ctrl-C at any moment of a start: one line, exit code 130, no process left, and a run that is whole or not there.

Each case starts a real process and waits for a line of its progress, then interrupts its process group, as a terminal does.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from everlong.environments.tasks.terminal.generate import Split, make_terminal

CODE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from everlong.cli.entry import main; main()"
TINY = [
    "--warmup.num-batches",
    "2",
    "--warmup.traces-per-batch",
    "2",
    "--schedule.num-batches",
    "2",
    "--schedule.groups-per-batch",
    "2",
    "--schedule.group-size",
    "2",
    "--observe.progress",
    "plain",
]
MOMENTS = {
    "making the tasks": ("making 900 tasks", False),
    "starting the worker": ("starting the worker", True),
    "playing the traces": ("playing the oracle traces", True),
    "evaluating": ("evaluating the held-out tasks", True),
}
"""The line that is waited for, and whether a run is there then."""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("tasks")
    for split in (Split.TRAIN, Split.EVAL):
        make_terminal(folder / split, 3, split=split, kinds=("write-word",))
    return ["--tasks.train", str(folder / "train"), "--tasks.eval", str(folder / "eval"), "--warmup.num-tasks", "3"]


def everlong(cwd: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", CODE, *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def interrupted(process: subprocess.Popen[str], line: str) -> list[str]:
    """What was said after the line."""
    assert process.stderr is not None
    for said in process.stderr:
        if said.startswith(line):
            break
    else:
        pytest.fail(f"it never said {line!r}")
    os.killpg(process.pid, signal.SIGINT)
    out, rest = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    return rest.splitlines()


def is_free(lock: Path) -> bool:
    """Whether no worker holds it."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return True


@pytest.mark.parametrize(
    ("moment", "model"),
    [*((moment, "scripted") for moment in MOMENTS), ("starting the worker", "toy")],
    ids=[*MOMENTS, "loading a network"],
)
def test_ctrl_c_leaves_a_whole_run_or_none_and_no_process(
    moment: str, model: str, tasks: list[str], tmp_path: Path
) -> None:
    line, is_there = MOMENTS[moment]
    named = tasks if is_there else []
    said = interrupted(everlong(tmp_path, "train", "--model.type", model, *TINY, *named, "--output", "run"), line)
    if not is_there:
        assert (said, list(tmp_path.iterdir())) == (["stopped"], [])
        return
    assert said == ["stopped; `everlong resume run` goes on from here"]
    lock = tmp_path / "run" / "worker.lock"
    assert not lock.exists() or is_free(lock)
    if model == "scripted":
        again = everlong(tmp_path, "resume", "run")
        _, rest = again.communicate(timeout=120)
        assert again.returncode == 0 and "batch 2/2" in rest
