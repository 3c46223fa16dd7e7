"""`everlong train`, `everlong sft` and `everlong resume`: from arguments to a finished run and its report."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from everlong.cli.arguments import DRY_RUN, parse_config
from everlong.cli.compose import open_control
from everlong.cli.config import RunConfig
from everlong.cli.event_loop import run_to_the_end
from everlong.cli.quickstart import prepare_quickstart
from everlong.cli.reporting import success_lines, write_run_report
from everlong.cli.run_folder import RunFolder
from everlong.cli.sinks import open_sinks
from everlong.cli.store_owner import claim_store, refuse_taken_store
from everlong.cli.toml import config_text
from everlong.environments.grading.grader import open_grader
from everlong.environments.tasks.sources import read_run_tasks
from everlong.ledger import Ledger, RunFinished
from everlong.models.config import OwnModel, ScriptedModel
from everlong.models.source import find_model
from everlong.orchestrator.loop import run
from everlong.rollouts.harnesses.opening import open_harness

console = Console(stderr=True, highlight=False)

STOPPED = 130
"""Exit code after Ctrl-C or SIGTERM, as a shell reports it."""


def train_command(arguments: list[str]) -> None:
    _start(parse_config([word for word in arguments if word != DRY_RUN]), dry=DRY_RUN in arguments)


def sft_command(arguments: list[str]) -> None:
    """Raises ValueError for a config without warm-up batches, or whose model does not train."""
    config = parse_config([word for word in arguments if word != DRY_RUN], "sft")
    _start(supervised_only(config), dry=DRY_RUN in arguments)


def supervised_only(config: RunConfig) -> RunConfig:
    """The run's warm-up without its RL batches."""
    if not config.warmup.num_batches:
        raise ValueError("sft trains the warm-up's batches and warmup.num_batches is 0: set it to 1 or more")
    if isinstance(config.model, ScriptedModel):
        raise ValueError("model.type=scripted has nothing to train: choose toy, smollm2, folder or hub")
    return config.model_copy(update={"schedule": config.schedule.model_copy(update={"num_batches": 0})})


def _start(config: RunConfig, *, dry: bool) -> None:
    if dry:
        print(config_text(config), end="")
        return
    folder = RunFolder(config.output)
    folder.refuse_run()
    _check_own_parts(config)
    refuse_taken_store(config, folder)
    prepare_quickstart(config, folder)
    _check_tasks(config)
    claim_store(config, folder)
    folder.create(config)
    console.print(f"run {folder.path}")
    _drive(config, folder, resume=False)


def _check_own_parts(config: RunConfig) -> None:
    """Before anything of the run exists. Raises ValueError for a name of code that is not there."""
    open_harness(config.harness)
    open_grader(config.grading)
    if isinstance(config.model, OwnModel):
        find_model(config.model)


def _check_tasks(config: RunConfig) -> None:
    """Before anything of the run exists. Raises ValueError for tasks that cannot be read, and for none."""
    tasks = read_run_tasks(config.tasks)
    if not len(tasks.train) and (config.schedule.num_batches or config.warmup.num_batches):
        raise ValueError("there are batches to train but no training tasks: give tasks.train a folder with tasks")
    if (config.warmup.num_tasks or 0) > len(tasks.train):
        raise ValueError(
            f"warmup.num_tasks is {config.warmup.num_tasks} and tasks.train holds {len(tasks.train)}: lower it, or set it to None"
        )


def resume_command(path: Path) -> None:
    folder = RunFolder(path)
    config = folder.read_config()
    if _is_finished(folder):
        # it may have been killed between its last fact and its report
        console.print(f"finished already: {folder.path}", soft_wrap=True)
        _tell(folder)
        return
    console.print(f"resume {folder.path}")
    _drive(config, folder, resume=folder.ledger.exists())


def _is_finished(folder: RunFolder) -> bool:
    """Raises LedgerError, with its process id, where another process drives the run."""
    if not folder.ledger.exists():
        return False
    ledger = Ledger.open(folder.ledger)
    try:
        return ledger.lifecycle.finished
    finally:
        ledger.close()


def _drive(config: RunConfig, folder: RunFolder, *, resume: bool) -> None:
    try:
        run_to_the_end(_train(config, folder, resume))
    except (asyncio.CancelledError, KeyboardInterrupt):
        console.print(f"stopped; `everlong resume {folder.path}` goes on from here", markup=False)
        sys.exit(STOPPED)
    _tell(folder)


def _tell(folder: RunFolder) -> None:
    """Write the report and say what came of the run."""
    report = write_run_report(folder)
    for line in success_lines(folder):
        console.print(line, style="bold")
    if folder.checkpoint.exists():
        console.print(f"checkpoint  {folder.checkpoint}")
    if folder.adapter.exists():
        console.print(f"adapter     {folder.adapter}")
    console.print(f"report      {report}")


async def _train(config: RunConfig, folder: RunFolder, resume: bool) -> None:
    """Drive the run to its end. SIGTERM stops it like Ctrl-C: resumable."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    sinks = open_sinks(config, folder)
    try:
        async with open_control(config, folder, sinks, time.monotonic, resume=resume) as control:
            await run(control.scheduler, control.conductor, time.monotonic)
            if not isinstance(config.model, ScriptedModel) and not folder.checkpoint.exists():
                await control.trainer.export(str(folder.checkpoint))
            await control.ledger.append(RunFinished())
    finally:
        sinks.close()
