"""Harness, reward and model of one's own, named in the config, do what they say in a run, and beside it in `eval`."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import safe_open

from everlong.cli.run_folder import RunFolder
from everlong.contracts.errors import Reason
from everlong.contracts.records import Purpose
from everlong.environments.tasks.terminal.generate import Split, make_terminal
from everlong.ledger import read_lifecycle
from everlong.observe import read_points

PARTS = '''
import asyncio
from dataclasses import replace

from everlong.contracts.errors import Reason
from everlong.contracts.records import Verdict
from everlong.models.source import ModelSource, toy_config
from everlong.rollouts.harnesses.bash import BashHarness
from everlong.rollouts.messages import Message


async def said(submission):
    """0.25 per turn, and 2 where the agent ran a command that the model named."""
    assert [answer for answer in submission.answers if not answer.strip()] == []
    return Verdict(reward=0.25 * len(submission.turns) + 2 * submission.answers[0].startswith("$"))


async def undecided(submission):
    return Verdict(reward=None)


class Twice(BashHarness):
    """The bash agent, two times."""

    async def run(self, task, session, sandbox):
        await super().run(task, session, sandbox)
        return await super().run(task, session, sandbox)


class Deaf(BashHarness):
    """Ends for nobody, and has a task of its own that does not either; says in `deaf` that it has begun."""

    async def run(self, task, session, sandbox):
        await session.chat([Message(role="user", content="hi")])
        self.other = asyncio.create_task(self.work())
        open("deaf", "w").close()
        await self.work()

    async def work(self):
        while True:
            try:
                await asyncio.sleep(3600)
            except BaseException:
                pass


def small():
    def build(shape, dtype, numerics):
        from everlong.models.toy import random_llama

        return random_llama(shape, 7, dtype, numerics)

    return ModelSource(replace(toy_config(), num_layers=1), None, build)
'''


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "run.toml").write_text(RUN)
    for split in (Split.TRAIN, Split.EVAL):
        make_terminal(tmp_path / split, 2, split=split, kinds=("write-word",))
    return tmp_path


def everlong(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from everlong.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True, timeout=240
    )


RUN = """
output = "run"
tasks = { train = ["train"], eval = ["eval"] }
warmup = { num_batches = 0 }
schedule = { num_batches = 1, groups_per_batch = 2, group_size = 2 }
observe = { progress = "none" }
"""
SHORT = ("@", "run.toml")


def test_own_harness_and_reward_make_a_runs_episodes(workplace: Path) -> None:
    parts = ["--harness.type", "parts:Twice", "--grading.type", "parts:said"]
    done = everlong(workplace, "train", "--model.type", "scripted", *SHORT, *parts)
    assert done.returncode == 0, done.stderr
    views = read_lifecycle(RunFolder(workplace / "run").ledger).episodes.values()
    assert {view.reward for view in views} == {2.75}, "a command, done, and done again"
    assert everlong(workplace, "eval", "run", "--json", "figures.json").returncode == 0
    assert json.loads((workplace / "figures.json").read_text())["reward"] == 2.75


def test_an_evaluation_without_a_verdict_is_no_success_of_0(workplace: Path) -> None:
    done = everlong(workplace, "train", "--model.type", "scripted", *SHORT, "--grading.type", "parts:undecided")
    assert done.returncode == 0, done.stderr
    rows = [point.values for point in read_points(workplace / "run/metrics.jsonl") if point.axis == "eval"]
    assert [(row["episodes"], row["without_verdict"]) for row in rows] == [(0, 2), (0, 2)]
    assert not any({"success", "reward"} & row.keys() for row in rows)


OWN_MODEL = (
    *("--model.type", "own", "--model.source", "parts:small"),
    *("--sampling.max-tokens", "4", "--harness.max-turns", "1"),
)


def test_an_own_model_trains_and_is_exported(workplace: Path) -> None:
    done = everlong(workplace, "train", *SHORT, *OWN_MODEL, "--admission.zero-signal", "keep")
    assert done.returncode == 0, done.stderr
    with safe_open(workplace / "run/checkpoint/model.safetensors", "pt") as weights:
        assert {name.split(".")[2] for name in weights.keys() if ".layers." in name} == {"0"}  # noqa: SIM118
    assert "parts:small in float32" in (workplace / "run/report.html").read_text()


def start(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    code = "from everlong.cli.main import main; main()"
    words = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


DEAF = ("--model.type", "scripted", *SHORT, "--harness.type", "parts:Deaf")


def test_a_harness_that_ignores_its_cancellation_holds_up_neither_deadline_nor_end(workplace: Path) -> None:
    limits = ["--schedule.batch-deadline-s", "2", "--schedule.eval-deadline-s", "2"]
    done = everlong(workplace, "train", *DEAF, *limits)
    assert done.returncode == 0, done.stderr
    lifecycle = read_lifecycle(RunFolder(workplace / "run").ledger)
    assert lifecycle.finished
    assert {(view.purpose, view.reason) for view in lifecycle.episodes.values()} == {
        (Purpose.TRAIN, Reason.DEADLINE),
        (Purpose.EVAL, Reason.DEADLINE),
    }
    for told in (done.stderr, (workplace / "run/report.html").read_text()):
        assert "not one token was trained in its one RL batch" in told and "schedule.batch_deadline_s" in told


def test_a_run_that_taught_its_model_nothing_fails_and_says_what_to_do(workplace: Path) -> None:
    done = everlong(workplace, "train", *SHORT, *OWN_MODEL)
    assert done.returncode == 3, done.stderr
    assert "its 4 episodes ended as: zero_signal 4" in done.stderr and "warmup.num_batches" in done.stderr
    assert everlong(workplace, "resume", "run").returncode == 3, "finished, and nothing came of it"


def test_a_run_is_stopped_although_its_harness_ignores_it(workplace: Path) -> None:
    with start(workplace, "train", *DEAF) as running:
        while not (workplace / "deaf").exists():
            assert running.poll() is None, running.stderr.read()
            time.sleep(0.05)
        running.terminate()
        _, said = running.communicate(timeout=240)
    assert running.returncode == 130 and "everlong resume run" in said, said


def test_a_store_belongs_to_one_run_and_says_to_which(workplace: Path) -> None:
    mine = ("--model.type", "scripted", *SHORT, "--weights.store", "shared")
    assert everlong(workplace, "train", *mine).returncode == 0
    done = everlong(workplace, "train", *mine, "--output", "other")
    assert done.returncode == 2 and "Traceback" not in done.stderr
    said = " ".join(done.stderr.split())
    assert f"belongs to the run {workplace / 'run'} on" in said and "--weights.store" in said
    assert not (workplace / "other").exists()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--harness.type parts:Thrice", "module parts has no Thrice; it has"),
        ("--grading.type nobodys:said", "there is no module nobodys among the installed packages"),
        ("--model.type own --model.source parts:PARTS", "module parts has no PARTS"),
        ("--grading.type judge", "should match pattern"),
    ],
)
def test_a_part_that_is_not_there_stops_the_run_before_it_exists(workplace: Path, option: str, message: str) -> None:
    done = everlong(workplace, "train", *SHORT, *option.split())
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
    assert not (workplace / "run").exists()
