"""The quickstart: `everlong train` without a file. A language model learns terminal tasks in minutes on two cores."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from everlong.cli.config import RunConfig, SamplingConfig
from everlong.cli.run_folder import RunFolder
from everlong.environments.tasks.config import TasksConfig
from everlong.environments.tasks.terminal.generate import Split, make_terminal
from everlong.models.config import ModelConfig, ScriptedModel, Smollm2Model, ToyModel
from everlong.orchestrator.config import RoundsConfig, WarmupConfig
from everlong.rollouts.config import HarnessConfig
from everlong.trainer.config import AdamWConfig


@dataclass(frozen=True, slots=True)
class QuickstartTasks:
    kinds: tuple[str, ...]
    num_train: int
    num_eval: int
    """Held-out variants of the same kinds."""


TOY_TASKS = QuickstartTasks(("write-word", "make-folder", "rename-file"), num_train=900, num_eval=150)
"""Enough different words that the model has to learn copying instead of the tasks by heart."""
LANGUAGE_TASKS = QuickstartTasks(
    (
        "write-word",
        "make-folder",
        "rename-file",
        "append-line",
        "copy-into-folder",
        "csv-column",
        "first-lines",
        "sort-unique",
        "find-file",
        "json-key",
    ),
    num_train=400,
    num_eval=200,
)
"""The last two kinds need the output of one command for the next."""


def quickstart_config(model_type: str = "smollm2") -> RunConfig:
    """Of "toy" and "scripted" the toy's, of every other `model.type` the language model's; the model itself is to be set.

    Both warm-ups stop early, so that trying finds successes and failures, and learn at a higher rate than RL: imitation says
    which token was right, a reward only whether all of them were.
    """
    output = _free_folder()
    if model_type in ("toy", "scripted"):
        return RunConfig(
            output=output,
            model=ToyModel(),
            tasks=quickstart_tasks(output),
            harness=HarnessConfig(system_prompt="", max_turns=4, max_context=512),
            sampling=SamplingConfig(max_tokens=64),
            warmup=WarmupConfig(num_batches=210, traces_per_batch=64),
            schedule=RoundsConfig(num_batches=24, groups_per_batch=16, group_size=8, eval_every=8, checkpoint_every=10),
            optimizer=AdamWConfig(learning_rate=3e-4, supervised_learning_rate=2e-3, warmup_batches=20),
        )
    return RunConfig(
        output=output,
        # the tag is said: of a default the command line keeps what was set, and without it the model would be the toy
        model=Smollm2Model(type="smollm2", dtype="bfloat16"),
        tasks=quickstart_tasks(output),
        harness=HarnessConfig(system_prompt="", max_turns=4, max_context=512),
        sampling=SamplingConfig(max_tokens=48),
        warmup=WarmupConfig(num_batches=6, traces_per_batch=32, num_tasks=96),
        schedule=RoundsConfig(num_batches=20, groups_per_batch=8, group_size=8, eval_every=10, checkpoint_every=10),
        optimizer=AdamWConfig(learning_rate=3e-5, supervised_learning_rate=1e-4),
    )


def quickstart_tasks(output: Path) -> TasksConfig:
    """The tasks that a quickstart into this folder makes for itself."""
    return TasksConfig(train=(output / "tasks" / "train",), eval=(output / "tasks" / "eval",))


def prepare_quickstart(config: RunConfig, folder: RunFolder) -> None:
    """Generate the quickstart's tasks, unless the command named others."""
    made = tasks_for(config.model)
    for paths, split, count in (
        (config.tasks.train, Split.TRAIN, made.num_train),
        (config.tasks.eval, Split.EVAL, made.num_eval),
    ):
        for path in paths:
            if path.is_relative_to(folder.path) and not path.exists():
                make_terminal(path, count, seed=config.seed, split=split, kinds=made.kinds)


def tasks_for(model: ModelConfig) -> QuickstartTasks:
    return TOY_TASKS if isinstance(model, (ToyModel, ScriptedModel)) else LANGUAGE_TASKS


def _free_folder() -> Path:
    """The first of runs/quickstart-1, -2, … that does not exist."""
    names = (Path("runs") / f"quickstart-{number}" for number in itertools.count(1))
    return next(path for path in names if not path.exists())
