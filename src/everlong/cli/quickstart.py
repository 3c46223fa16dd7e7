"""The quickstart: `everlong train` without a file. A language model learns terminal tasks in minutes on two cores."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from everlong.cli.config import RunConfig, SamplingConfig
from everlong.cli.run_folder import RunFolder
from everlong.contracts.records import Record
from everlong.environments.tasks.config import TasksConfig
from everlong.environments.tasks.terminal.generate import Split, make_terminal
from everlong.models.config import ModelConfig, ScriptedModel, Smollm2Model, ToyModel, ToyMoeModel
from everlong.observe import SILENT, Stages
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
    """Of "toy", "toy-moe" and "scripted" the toy's, of every other `model.type` the language model's; the model itself is to be set.

    Both warm-ups stop early, so that trying finds successes and failures, and learn at a higher rate than RL: imitation says
    which token was right, a reward only whether all of them were.
    """
    output = _free_folder()
    if model_type in ("toy", "toy-moe", "scripted"):
        return RunConfig(
            output=output,
            model=ToyModel(),
            tasks=quickstart_tasks(output),
            harness=HarnessConfig(system_prompt="", max_turns=4, max_context=512),
            sampling=SamplingConfig(max_tokens=64),
            warmup=WarmupConfig(num_batches=210, traces_per_batch=64),
            schedule=RoundsConfig(num_batches=24, groups_per_batch=16, group_size=8, eval_every=8, checkpoint_every=10),
            optimizer=AdamWConfig(learning_rate=3e-4, supervised_learning_rate=2e-3, warmup_steps=20),
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


class MadeTasks(Record, frozen=True, kw_only=True):
    """A set of generated tasks.

    Example: MadeTasks(split=Split.TRAIN, count=900, kinds=("write-word", "make-folder"))
    """

    split: Split
    count: int
    kinds: tuple[str, ...]


def tasks_to_make(config: RunConfig, folder: RunFolder) -> dict[Path, MadeTasks]:
    """The task folders that a quickstart makes for itself, and what into them: those inside its run that are not there yet."""
    made = tasks_for(config.model)
    sets = (
        (config.tasks.train, MadeTasks(split=Split.TRAIN, count=made.num_train, kinds=made.kinds)),
        (config.tasks.eval, MadeTasks(split=Split.EVAL, count=made.num_eval, kinds=made.kinds)),
    )
    own = quickstart_tasks(folder.path)
    return {
        path: what for paths, what in sets for path in paths if path in (*own.train, *own.eval) and not path.exists()
    }


def make_tasks(config: RunConfig, path: Path, made: MadeTasks) -> None:
    make_terminal(path, made.count, seed=config.seed, split=made.split, kinds=made.kinds)


def prepare_quickstart(config: RunConfig, folder: RunFolder, stages: Stages = SILENT) -> None:
    """Generate the quickstart's tasks, unless the command named others."""
    for path, made in tasks_to_make(config, folder).items():
        with stages.stage(f"making {made.count} tasks in {path}"):
            make_tasks(config, path, made)


def tasks_for(model: ModelConfig) -> QuickstartTasks:
    return TOY_TASKS if isinstance(model, (ToyModel, ToyMoeModel, ScriptedModel)) else LANGUAGE_TASKS


def _free_folder() -> Path:
    """The first of runs/quickstart-1, -2, … that does not exist."""
    names = (Path("runs") / f"quickstart-{number}" for number in itertools.count(1))
    return next(path for path in names if not path.exists())
