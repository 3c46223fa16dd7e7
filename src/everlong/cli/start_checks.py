"""What a new run needs, checked before anything of it is written. `--dry-run` does the same checks and stops there.

What the user named comes first, then what takes time: a misspelt path is not told after a minute of preparation.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import msgspec

from everlong.cli.config import RunConfig
from everlong.cli.model_fits import refuse_misfit
from everlong.cli.quickstart import make_tasks, tasks_to_make
from everlong.cli.rendering import make_renderer
from everlong.cli.run_folder import RunFolder
from everlong.cli.store_owner import local_store, refuse_taken_store
from everlong.cli.traces import tasks_to_show
from everlong.engines.config import VllmConfig, engines_of
from everlong.environments.grading.grader import open_grader
from everlong.environments.grading.verifier import check_time_budget, check_verdict_paths
from everlong.environments.sandboxes.opening import open_backend
from everlong.environments.sandboxes.registry import scratch_folder
from everlong.environments.tasks.config import TasksConfig
from everlong.environments.tasks.sources import RunTasks, read_run_tasks
from everlong.environments.tasks.terminal.generate import oracle_commands
from everlong.models.config import FolderModel, OwnModel, ScriptedModel
from everlong.models.numerics_env import prepare_process
from everlong.models.source import find_model, is_model_here
from everlong.observe import Stages
from everlong.rollouts.harnesses.opening import open_harness


def check_start(config: RunConfig, folder: RunFolder, stages: Stages, *, dry: bool) -> RunTasks | None:
    """The run's tasks as they were read here, so that nobody reads them again; None where the run makes some for itself.

    Raises ValueError, FileNotFoundError, FileExistsError, SandboxError or StoreError for what would stop the run's start.

    `dry`: a model that is not here yet is neither converted nor downloaded, so that what its files say stays unchecked.
    """
    folder.refuse_run()
    _check_place("--output", folder.path)
    if (store := local_store(config, folder)) is not None:
        _check_place("--weights.store", store)
    refuse_taken_store(config, folder)
    _check_parts(config)
    with _tasks(config, folder, stages) as tasks:
        made = sum(made.count for path, made in tasks_to_make(config, folder).items() if path in config.tasks.train)
        _check_tasks(config, tasks, max(len(tasks.train), made))
        _check_model(config, stages, dry=dry)
        with stages.stage("trying a sandbox"):
            asyncio.run(_check_sandboxes(config, tasks))
    return None if tasks_to_make(config, folder) else tasks


def _check_place(option: str, path: Path) -> None:
    """Raises ValueError where no folder can be made there, or nothing written into it."""
    place = next(place for place in (path.absolute(), *path.absolute().parents) if os.path.lexists(place))
    if not place.is_dir():
        raise ValueError(f"{option} {path}: a folder was expected, and {place} is none: name another place")
    if not os.access(place, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(place).f_flag & os.ST_RDONLY
        why = "lies on a file system that is read-only" if is_read_only else "cannot be written by this user"
        raise ValueError(f"{option} {path}: {place} {why}: name another place, or make it writable")


def _check_parts(config: RunConfig) -> None:
    """Parts that the config names. Raises ValueError for one that is not there."""
    open_harness(config.harness)
    open_grader(config.grading)
    if config.sandbox.root is not None:
        _check_place("--sandbox.root", config.sandbox.root)
    for engine in engines_of(config.engine):
        if isinstance(engine, VllmConfig) and engine.url is None:
            from everlong.engines.vllm_engine.server import find_python

            find_python(engine.python)
    if isinstance(config.model, OwnModel | FolderModel):
        find_model(config.model)
    if not isinstance(config.model, ScriptedModel) and find_spec("torch") is None:
        raise ValueError(
            f"model.type={config.model.type} needs the Python package torch, which is not installed: pip install "
            "'everlong[train]', or set model.type to scripted"
        )
    if config.worker == "inline":
        prepare_process(config.numerics)


@contextmanager
def _tasks(config: RunConfig, folder: RunFolder, stages: Stages) -> Generator[RunTasks]:
    """The tasks that the user named, and beside them, made aside, those that the run makes for itself. Of these a few where
    all are made: nobody else's can be among them then."""
    making = tasks_to_make(config, folder)
    named = _replaced(config.tasks, dict.fromkeys(making))
    is_sample = not (named.train or named.eval)
    if not is_sample:
        with stages.stage("reading the tasks"):
            tasks = read_run_tasks(named)
        if not making:
            yield tasks
            return
    with scratch_folder("start") as scratch:
        aside = {path: scratch / str(number) for number, path in enumerate(making)}
        with stages.stage("trying the run's own tasks"):
            for path, made in making.items():
                some = msgspec.structs.replace(made, count=len(made.kinds)) if is_sample else made
                make_tasks(config, aside[path], some)
            tasks = read_run_tasks(_replaced(config.tasks, aside))
        yield tasks


def _replaced(tasks: TasksConfig, others: Mapping[Path, Path | None]) -> TasksConfig:
    """With another path for some, and without those that have none."""

    def replaced(paths: tuple[Path, ...]) -> tuple[Path, ...]:
        return tuple(other for path in paths if (other := others.get(path, path)) is not None)

    return TasksConfig(train=replaced(tasks.train), eval=replaced(tasks.eval))


def _check_tasks(config: RunConfig, tasks: RunTasks, num_train: int) -> None:
    """Raises ValueError for tasks that the run cannot use, and for none."""
    if not num_train and (config.schedule.num_batches or config.warmup.num_batches):
        raise ValueError("there are batches to train but no training tasks: give tasks.train a folder with tasks")
    if (config.warmup.num_tasks or 0) > num_train:
        raise ValueError(
            f"warmup.num_tasks is {config.warmup.num_tasks} and tasks.train holds {num_train}: lower it, or set it to None"
        )
    if config.sandbox.ttl_s is not None:
        for task in tasks.by_id().values():
            check_time_budget(task.task.agent_timeout_s, task.task.verifier_timeout_s, config.sandbox.ttl_s)
    if config.warmup.num_batches:
        shown = tasks.train if len(tasks.train) < num_train else tasks_to_show(tasks.train, config)
        for task in shown:
            oracle_commands(task)


def _check_model(config: RunConfig, stages: Stages, *, dry: bool) -> None:
    """Raises FileNotFoundError for missing files and packages, ValueError for a model that does not fit the run."""
    is_here = is_model_here(config.model)
    if dry and not is_here:
        stages.say(
            f"not checked: model.type={config.model.type} is not on this machine yet, and the run will get it first"
        )
        return
    doing = "checking the model" if is_here else f"getting model {config.model.type}, once: it is kept for later runs"
    with stages.stage(doing):
        shape = find_model(config.model).shape
        config.context(shape.max_positions)
        refuse_misfit(config, shape)
        make_renderer(config)


async def _check_sandboxes(config: RunConfig, tasks: RunTasks) -> None:
    """Raises SandboxError where none can run here, ValueError for tasks whose verdict it would not find."""
    with scratch_folder("sandbox") as scratch:
        backend = open_backend(config.sandbox, scratch, warn=_nobody)  # the run itself warns
        try:
            await check_verdict_paths(tasks.by_id().values(), backend)
        finally:
            await backend.close()


def _nobody(warning: str) -> None:
    """Takes a warning that comes again."""
