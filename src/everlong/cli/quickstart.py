"""The quickstart: `everlong train` without a file. A small model learns terminal tasks in minutes on two cores."""

from __future__ import annotations

import itertools
from pathlib import Path

from everlong.cli.config import RunConfig, SamplingConfig
from everlong.cli.run_folder import RunFolder
from everlong.environments.tasks.config import TasksConfig
from everlong.environments.tasks.terminal.generate import Split, make_terminal
from everlong.orchestrator.config import ScheduleConfig, WarmupConfig
from everlong.rollouts.config import HarnessConfig
from everlong.trainer.config import AdamWConfig

KINDS = ("write-word", "make-folder", "rename-file")
NUM_TRAIN, NUM_EVAL = 900, 150
"""Enough different words that the model has to learn copying instead of the tasks by heart, and 8 points of interval."""


def quickstart_config() -> RunConfig:
    """The warm-up stops where the model copies about half of the words, so that trying finds both successes and failures.

    It learns at a higher rate than RL: imitation says which byte was right, a reward only whether all of them were.
    """
    output = _free_folder()
    return RunConfig(
        output=output,
        tasks=quickstart_tasks(output),
        harness=HarnessConfig(system_prompt="", max_turns=4, max_context=512),
        sampling=SamplingConfig(max_tokens=64),
        warmup=WarmupConfig(num_batches=210, traces_per_batch=64),
        schedule=ScheduleConfig(num_batches=24, groups_per_batch=16, group_size=8, eval_every=8, checkpoint_every=10),
        optimizer=AdamWConfig(learning_rate=3e-4, supervised_learning_rate=2e-3, warmup_batches=20),
    )


def quickstart_tasks(output: Path) -> TasksConfig:
    """The tasks that a quickstart into this folder makes for itself."""
    return TasksConfig(train=(output / "tasks" / "train",), eval=(output / "tasks" / "eval",))


def prepare_quickstart(config: RunConfig, folder: RunFolder) -> None:
    """Generate the quickstart's tasks, unless the command named others."""
    for paths, split, count in (
        (config.tasks.train, Split.TRAIN, NUM_TRAIN),
        (config.tasks.eval, Split.EVAL, NUM_EVAL),
    ):
        for path in paths:
            if path.is_relative_to(folder.path) and not path.exists():
                make_terminal(path, count, seed=config.seed, split=split, kinds=KINDS)


def _free_folder() -> Path:
    """The first of runs/quickstart-1, -2, … that does not exist."""
    names = (Path("runs") / f"quickstart-{number}" for number in itertools.count(1))
    return next(path for path in names if not path.exists())
