"""`everlong train`, `everlong sft` and `everlong resume`: from arguments to a finished run and its report."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from everlong.cli.absolute import absolute_paths
from everlong.cli.announced import Announced
from everlong.cli.arguments import DRY_RUN, parse_config
from everlong.cli.compose import open_control
from everlong.cli.config import RunConfig
from everlong.cli.entry import STOPPED
from everlong.cli.event_loop import run_to_the_end
from everlong.cli.fresh_folder import FreshFolder
from everlong.cli.origin import origin_of, refuse_other_tasks
from everlong.cli.quickstart import prepare_quickstart
from everlong.cli.reporting import success_lines, write_run_report
from everlong.cli.run_folder import RunFolder
from everlong.cli.sinks import open_sinks, progress_console
from everlong.cli.start_checks import check_start
from everlong.cli.store_owner import claim_store
from everlong.cli.toml import config_text
from everlong.cli.untrained import TAUGHT_NOTHING, num_rl_batches, taught_nothing, untrained_lines
from everlong.contracts.errors import EverlongError, WorkerDied
from everlong.environments.tasks.sources import RunTasks, read_run_tasks
from everlong.ledger import Ledger, RunFinished, read_lifecycle
from everlong.models.config import ScriptedModel
from everlong.observe import Stages
from everlong.orchestrator.loop import run

console = Console(stderr=True, highlight=False)


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
    folder, terminal = RunFolder(config.output), progress_console(config)
    stages = Stages(terminal)
    tasks = check_start(config, folder, stages, dry=dry)
    if dry:
        print(config_text(config), end="")
        return
    with FreshFolder(config, folder) as fresh:
        prepare_quickstart(config, folder, stages)
        config = absolute_paths(config)
        tasks = tasks or _read_tasks(config, stages)
        claim_store(config, folder)
        folder.create(config, origin_of(tasks))
        console.print(f"run {folder.path}")
        _drive(config, folder, tasks, terminal, resume=False, started=fresh.keep)


def resume_command(path: Path) -> None:
    folder = RunFolder(path)
    config = folder.open()
    if _is_finished(folder):
        # it may have been killed between its last fact and its report
        console.print(f"finished already: {folder.path}", soft_wrap=True)
        _tell(folder)
        return
    terminal = progress_console(config)
    tasks = _read_tasks(config, Stages(terminal))
    if (origin := folder.read_origin()) is not None:
        refuse_other_tasks(origin, tasks)
    console.print(f"resume {folder.path}")
    _drive(config, folder, tasks, terminal, resume=folder.ledger.exists(), started=lambda: None)


def _read_tasks(config: RunConfig, stages: Stages) -> RunTasks:
    with stages.stage("reading the tasks"):
        return read_run_tasks(config.tasks)


def _is_finished(folder: RunFolder) -> bool:
    """Raises LedgerError, with its process id, where another process drives the run."""
    if not folder.ledger.exists():
        return False
    ledger = Ledger.open(folder.ledger)
    try:
        return ledger.lifecycle.finished
    finally:
        ledger.close()


def _drive(
    config: RunConfig,
    folder: RunFolder,
    tasks: RunTasks,
    terminal: Console | None,
    *,
    resume: bool,
    started: Callable[[], None],
) -> None:
    """`started` is called once the run is under way."""
    under_way = False

    def begun() -> None:
        nonlocal under_way
        under_way = True
        started()

    resuming = f"`everlong resume {folder.path}` goes on"
    try:
        run_to_the_end(_train(config, folder, tasks, terminal, resume, begun))
    except (asyncio.CancelledError, KeyboardInterrupt):
        console.print(f"stopped; {resuming} from here", markup=False, soft_wrap=True)
        sys.exit(STOPPED)
    except (EverlongError, OSError) as error:
        if under_way or isinstance(error, WorkerDied):
            console.print(f"{resuming} from what is stored, once this is mended:", markup=False, soft_wrap=True)
        raise
    with Stages(terminal).stage("writing the report"):
        _tell(folder)


def _tell(folder: RunFolder) -> None:
    """Write the report and say what came of the run. Ends with `TAUGHT_NOTHING` where that is nothing."""
    report, config = write_run_report(folder), folder.open()
    for line in success_lines(folder):
        console.print(line, style="bold")
    lifecycle = read_lifecycle(folder.ledger)
    untrained = untrained_lines(config, num_rl_batches(lifecycle), lifecycle.episodes.values(), folder.path)
    for line in untrained:
        console.print(line, style="bold yellow", markup=False, soft_wrap=True)
    if folder.checkpoint.exists():
        console.print(f"checkpoint  {folder.checkpoint}")
    if folder.adapter.exists():
        console.print(f"adapter     {folder.adapter}")
    console.print(f"report      {report}")
    if taught_nothing(config, untrained):
        sys.exit(TAUGHT_NOTHING)


async def _train(
    config: RunConfig,
    folder: RunFolder,
    tasks: RunTasks,
    terminal: Console | None,
    resume: bool,
    started: Callable[[], None],
) -> None:
    """Drive the run to its end. SIGTERM stops it like Ctrl-C: resumable."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    sinks, stages = open_sinks(config, folder, terminal), Stages(terminal)
    try:
        async with open_control(
            config, folder, sinks, time.monotonic, resume=resume, stages=stages, tasks=tasks
        ) as control:
            started()
            await run(control.scheduler, Announced(control.conductor, stages), time.monotonic)
            if not isinstance(config.model, ScriptedModel) and not folder.checkpoint.exists():
                with stages.stage(f"writing the checkpoint {folder.checkpoint}"):
                    await control.trainer.export(str(folder.checkpoint))
            await control.ledger.append(RunFinished())
    finally:
        sinks.close()
