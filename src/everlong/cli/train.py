"""`everlong train`, `everlong sft` and `everlong resume`: from arguments to a finished run and its report."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from everlong.cli.compose import open_control
from everlong.cli.config import RunConfig
from everlong.cli.quickstart import prepare_quickstart, quickstart_config, quickstart_tasks
from everlong.cli.reporting import write_run_report
from everlong.cli.run_folder import RunFolder
from everlong.cli.sinks import open_sinks
from everlong.cli.toml import config_text
from everlong.ledger import RunFinished
from everlong.models.config import ScriptedModel
from everlong.orchestrator.loop import run

console = Console(stderr=True, highlight=False)


def parse_config(arguments: Sequence[str], command: str = "train") -> tuple[RunConfig, bool]:
    """The resolved config, and whether it is the quickstart's. Raises ValueError for a file that cannot be read."""
    from pydantic_config import ConfigFileError, cli

    quickstart = not any(argument.startswith("@") for argument in arguments)
    default = quickstart_config() if quickstart else None
    try:
        config = cli(RunConfig, args=list(arguments), default=default, prog=f"everlong {command}")
    except ConfigFileError as error:
        raise ValueError(str(error)) from error
    if default is not None and config.tasks == default.tasks:  # they go where the run goes
        config = config.model_copy(update={"tasks": quickstart_tasks(config.output)})
    return config, quickstart


def train_command(arguments: list[str]) -> None:
    dry = "--dry-run" in arguments
    _start(*parse_config([a for a in arguments if a != "--dry-run"]), dry=dry)


def sft_command(arguments: list[str]) -> None:
    """Raises ValueError for a config without warm-up batches, or whose model does not train."""
    dry = "--dry-run" in arguments
    config, quickstart = parse_config([a for a in arguments if a != "--dry-run"], "sft")
    _start(supervised_only(config), quickstart, dry=dry)


def supervised_only(config: RunConfig) -> RunConfig:
    """The run's warm-up without its RL batches."""
    if not config.warmup.num_batches:
        raise ValueError("sft trains the warm-up's batches and warmup.num_batches is 0: set it to 1 or more")
    if isinstance(config.model, ScriptedModel):
        raise ValueError("model.type=scripted has nothing to train: choose toy, smollm2, folder or hub")
    return config.model_copy(update={"schedule": config.schedule.model_copy(update={"num_batches": 0})})


def _start(config: RunConfig, quickstart: bool, *, dry: bool) -> None:
    if dry:
        print(config_text(config), end="")
        return
    folder = RunFolder(config.output)
    if quickstart:
        prepare_quickstart(config, folder)
    folder.create(config)
    console.print(f"run {folder.path}")
    _drive(config, folder, resume=False)


def resume_command(path: Path) -> None:
    folder = RunFolder(path)
    config = folder.read_config()
    console.print(f"resume {folder.path}")
    _drive(config, folder, resume=folder.ledger.exists())


def _drive(config: RunConfig, folder: RunFolder, *, resume: bool) -> None:
    finished = asyncio.run(_train(config, folder, resume))
    if finished:
        report = write_run_report(folder)
        console.print(f"checkpoint {folder.checkpoint}" if folder.checkpoint.exists() else "", end="\n")
        console.print(f"report {report}")
    else:
        console.print(f"the run {folder.path} is finished already")


async def _train(config: RunConfig, folder: RunFolder, resume: bool) -> bool:
    """Drive the run to its end; False where it had ended before. SIGTERM stops it like Ctrl-C: resumable."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    sinks = open_sinks(config, folder)
    try:
        async with open_control(config, folder, sinks, time.monotonic, resume=resume) as control:
            if control.ledger.lifecycle.finished:
                return False
            await run(control.scheduler, control.conductor, time.monotonic)
            if not isinstance(config.model, ScriptedModel) and not folder.checkpoint.exists():
                await control.trainer.export(str(folder.checkpoint))
            await control.ledger.append(RunFinished())
    finally:
        sinks.close()
    return True
