"""A run small enough to be repeated many times, in which nevertheless everything happens: warm-up, evaluations, real
sandboxes, checkpoints that lag behind the ledger, groups with and without signal."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from everlong.cli.config import ObserveConfig, RunConfig, SamplingConfig
from everlong.cli.toml import write_config
from everlong.environments.tasks.config import TasksConfig
from everlong.environments.tasks.terminal.generate import Split, make_terminal
from everlong.models.config import ScriptedModel, ToyModel
from everlong.orchestrator.config import RoundsConfig, WarmupConfig
from everlong.rollouts.config import HarnessConfig
from everlong.trainer.config import AdamWConfig

SRC = Path(__file__).resolve().parents[2] / "src"
COMMAND = (sys.executable, "-c", "from everlong.cli.main import main; main()")

# A policy that has seen a few dozen traces reaches this one often, but not always: so groups differ in their rewards.
ANY_FILE = """#!/bin/bash
if [ -n "$(ls -A)" ]; then reward=1; else reward=0; fi
echo "$reward" > "$EVERLONG_ROOT/logs/verifier/reward.txt"
"""


NETWORK: dict[str, Any] = {"numerics": "aligned", "threads": 1, "optimizer": AdamWConfig(learning_rate=3e-3)}
"""What has an effect only where there is a network."""


def make_tasks(folder: Path, *, easy: bool) -> TasksConfig:
    """Tasks to write a word into a file, made where the folder holds none.

    In the easy ones any file will do, and their oracle has few letters to learn.
    """
    config = TasksConfig(train=(folder / Split.TRAIN,), eval=(folder / Split.EVAL,))
    if folder.exists():
        return config
    scratch = folder.with_name(f"{folder.name}-partial")
    shutil.rmtree(scratch, ignore_errors=True)
    for split, count in ((Split.TRAIN, 6), (Split.EVAL, 2)):
        made = make_terminal(scratch / split, count, split=split, kinds=("write-word",))
        for number, task in enumerate(made if easy else ()):
            (task / "instruction.md").write_text(f"Make a file. {split} {number}\n")
            (task / "solution" / "solve.sh").write_text("#!/bin/bash\necho a > b\n")
            (task / "tests" / "test.sh").write_text(ANY_FILE)
    scratch.rename(folder)
    return config


def small_config(tasks: TasksConfig, output: Path, model: Literal["toy", "scripted"], num_warmup: int) -> RunConfig:
    """Four batches of 3 groups x 4 episodes with an evaluation before and after; a checkpoint every second batch."""
    network = NETWORK if model == "toy" else {}
    return RunConfig(
        **network,
        output=output,
        model=ToyModel() if model == "toy" else ScriptedModel(),
        tasks=tasks,
        harness=HarnessConfig(system_prompt="", max_turns=2, max_context=384),
        sampling=SamplingConfig(max_tokens=24),
        warmup=WarmupConfig(num_batches=num_warmup, traces_per_batch=8),
        schedule=RoundsConfig(num_batches=4, groups_per_batch=3, group_size=4, checkpoint_every=2),
        observe=ObserveConfig(progress="plain"),
    )


def start_train(config: RunConfig) -> subprocess.Popen[bytes]:
    """`everlong train` in a process of its own; what it says goes into a log beside the run's folder."""
    described = config.output.with_suffix(".toml")
    described.parent.mkdir(parents=True, exist_ok=True)
    write_config(config, described)
    return start("train", "@", str(described), log=config.output.with_suffix(".log"))


def start(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
    """The `everlong` command, one thread per process."""
    path = os.pathsep.join([str(SRC), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        return subprocess.Popen(
            [*COMMAND, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
        )
