"""A run is killed before its first checkpoint and resumed where something is different: its model, its CPU, its worker."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.campaign.comparing import facts_of

from everlong.cli.rendering import checkpoint_companions
from everlong.cli.run_folder import RunFolder
from everlong.environments.tasks.terminal.generate import make_terminal
from everlong.ledger import WeightsAdopted, check_ledger, read_lifecycle
from everlong.models.checkpoint import save_checkpoint
from everlong.models.config import ToyModel
from everlong.models.source import find_model, toy_config
from everlong.models.toy import random_llama
from everlong.observe import read_points

PARTS = '''
import itertools
import os
import signal
import sys
from pathlib import Path

from everlong.contracts.records import Verdict
from everlong.rollouts.harnesses.bash import BashHarness

STOPPED = Path(__file__).with_name("stopped")
numbers = itertools.count()


async def judge(submission):
    return Verdict(reward=float(next(numbers) % 2))


class KilledOnce(BashHarness):
    """In the third batch, its control process."""

    async def run(self, task, session, sandbox):
        if session.order.group == 4 and not STOPPED.exists():
            STOPPED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().run(task, session, sandbox)


class KillsWorker(BashHarness):
    async def run(self, task, session, sandbox):
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            if b"cells.worker" in Path("/proc", child, "cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)
        return await super().run(task, session, sandbox)


class Exits(BashHarness):
    """In every way, and once from a task of its own that nobody waits for."""

    async def run(self, task, session, sandbox):
        if session.order.attempt == 0:
            sys.exit(0)
        if session.order.attempt == 1:
            import asyncio

            self.other = asyncio.create_task(self.leave())
        return await super().run(task, session, sandbox)

    async def leave(self):
        sys.exit(0)
'''
RUN = """
output = "run"
threads = 1
model = { type = "folder", path = "model" }
tasks = { train = "train" }
harness = { type = "parts:KilledOnce", system_prompt = "", max_turns = 1, max_context = 384 }
grading = { type = "parts:judge" }
sampling = { max_tokens = 8 }
warmup = { num_batches = 0 }
optimizer = { learning_rate = 3e-3 }
schedule = { num_batches = 3, groups_per_batch = 2, group_size = 4, checkpoint_every = 9 }
observe = { progress = "plain" }
"""
ANOTHER_CPU = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def everlong(cwd: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    code = "from everlong.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def said(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stderr.split())


def fill(home: Path) -> Path:
    home.mkdir()
    (home / "parts.py").write_text(PARTS)
    (home / "run.toml").write_text(RUN)
    make_terminal(home / "train", 3, kinds=("write-word",))
    model_in(home, seed=1)
    return home


def model_in(home: Path, seed: int) -> None:
    shutil.rmtree(home / "model", ignore_errors=True)
    network = random_llama(replace(toy_config(), num_layers=1), seed)
    save_checkpoint(network, home / "model", checkpoint_companions(find_model(ToyModel())))


def scripted(home: Path, harness: str) -> None:
    text = RUN.replace('{ type = "folder", path = "model" }', '{ type = "scripted" }').replace("KilledOnce", harness)
    lines = [line for line in text.splitlines() if not line.startswith(("threads", "optimizer"))]
    (home / "run.toml").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = fill(tmp_path_factory.mktemp("killed") / "home")
    assert everlong(home, "train", "@", "run.toml").returncode == -signal.SIGKILL
    assert read_lifecycle(RunFolder(home / "run").ledger).num_trained == 2
    assert not list((home / "run/store").glob("checkpoints/*"))
    return home


def test_a_model_that_was_exchanged_is_refused_before_the_first_checkpoint_too(killed: Path) -> None:
    rows = (killed / "run/metrics.jsonl").read_bytes()
    model_in(killed, seed=2)
    for command in (["resume", "run"], ["eval", "run", "--tasks", "train"]):
        done = everlong(killed, *command)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert f"model {killed}/model is not what the run was started with: its weights have the fingerprint" in said(
            done
        )
    assert (killed / "run/metrics.jsonl").read_bytes() == rows
    model_in(killed, seed=1)


def test_another_kind_of_cpu_goes_on_with_what_was_published(killed: Path) -> None:
    done = everlong(killed, "resume", "run", **ANOTHER_CPU)
    assert done.returncode == 0, done.stderr
    assert check_ledger(killed / "run").ok and read_lifecycle(RunFolder(killed / "run").ledger).finished
    adopted = [fact.version for fact in facts_of(killed / "run") if isinstance(fact, WeightsAdopted)]
    lines = [line for line in done.stderr.splitlines() if "going on with the published weights" in line]
    assert len(lines) == len(adopted)
    rows = [point for point in read_points(killed / "run/metrics.jsonl") if point.axis == "batch"]
    assert [row.step + 1 for row in rows if row.values.get("weights_adopted")] == adopted
    if not adopted:
        pytest.skip("this machine computes the same bits either way")


def test_a_worker_that_dies_leaves_word_of_the_run_to_resume(tmp_path: Path) -> None:
    home = fill(tmp_path / "home")
    scripted(home, "KillsWorker")
    done = everlong(home, "train", "@", "run.toml")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "`everlong resume run` goes on from what is stored" in said(done) and "resume RUN" not in said(done)


def test_code_of_ones_own_that_exits_ends_its_episode_and_not_the_run(tmp_path: Path) -> None:
    home = fill(tmp_path / "home")
    scripted(home, "Exits")
    done = everlong(home, "train", "@", "run.toml", "--schedule.num-batches", "1")
    assert done.returncode == 0, done.stderr
    lifecycle = read_lifecycle(RunFolder(home / "run").ledger)
    reasons = {view.attempt: str(view.finish_reason) for view in lifecycle.episodes.values()}
    assert lifecycle.finished and reasons[0] == "harness_crash" and "harness_crash" not in (reasons[1], reasons[2])
    assert "Task was destroyed" not in done.stderr
