"""The command line: help, exit codes, and errors that say what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from everlong.cli.main import main

HELP = {
    "": ("train", "resume", "eval", "serve", "view", "report", "bench", "tasks", "ledger"),
    "train": ("--dry-run", "@ run.toml", "--optimizer.learning-rate", "--loss.clip-high", "--loss.tau-positive"),
    "resume": ("RUN",),
    "eval": ("--tasks", "--attempts", "--version", "--json"),
    "serve": ("--host", "--port", "--version", "--key", "--allow-remote"),
    "view": ("RUN", "EPISODE"),
    "report": ("RUN",),
    "bench": ("NAME", "--json", "--store"),
    "tasks": ("make", "check", "show"),
    "tasks make": ("--count", "--out", "--seed", "--split", "--kinds"),
    "tasks check": ("FOLDERS", "--repeats", "--isolation"),
    "tasks show": ("FOLDER",),
    "ledger": ("check",),
    "ledger check": ("RUN",),
}


def run(*arguments: str) -> int:
    """The exit code of `everlong` with these arguments."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return int(stopped.value.code or 0)


@pytest.mark.parametrize("command", HELP)
def test_help_names_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*command.split(), "--help") == 0
    printed = capsys.readouterr().out
    assert [option for option in HELP[command] if option not in printed] == []


NO_RUN = ("resume", "eval", "serve", "view", "report", "ledger check")


@pytest.mark.parametrize("command", NO_RUN)
@pytest.mark.parametrize("made", [True, False], ids=["empty folder", "missing folder"])
def test_a_folder_without_run_is_named(
    command: str, made: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "nothing"
    if made:
        folder.mkdir()
    assert run(*command.split(), str(folder)) in (1, 2)
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert str(folder) in message
    assert folder.exists() == made


def test_a_folder_with_a_damaged_config_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text('output = "x"\n[optimizer]\nlearnign_rate = 1.0\n')
    assert run("resume", str(tmp_path)) == 2
    assert f"{tmp_path}/config.toml: there is no setting --optimizer.learnign-rate" in capsys.readouterr().err


BAD_COMMANDS = {
    "view --wrong x": "--wrong",
    "eval": "run",
    "bench nothing": "there is no bench 'nothing': there are aligned",
    "tasks make nothing --count 1 --out OUT": "there is no task source 'nothing': there are terminal and humaneval",
    "tasks make terminal --count 1 --out OUT --split nothing": "there is no split 'nothing'",
    "tasks make terminal --count -1 --out OUT": "-1",
    "tasks make terminal --out OUT": "say how many with --count",
    "tasks make humaneval --out OUT --seed 0": "--seed has no effect on humaneval",
    "tasks make humaneval --out OUT --kinds x": "--kinds has no effect on humaneval",
    "tasks check": "at least one task folder",
    "tasks check OUT": "OUT",
    "tasks show OUT": "OUT",
    "nothing": "nothing",
}


@pytest.mark.parametrize("command", BAD_COMMANDS)
def test_bad_input_is_one_message_and_no_zero_exit(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "missing")
    assert run(*command.replace("OUT", out).split()) in (1, 2)
    printed = capsys.readouterr()
    message = printed.err + printed.out
    assert BAD_COMMANDS[command].replace("OUT", out) in " ".join(message.split())
    assert "Traceback" not in message
    assert not Path(out).exists()


def test_a_message_with_brackets_is_printed_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "[/red]"
    assert run("view", str(folder)) == 1
    assert "[/red]" in capsys.readouterr().err


def test_commands_and_config_load_no_torch() -> None:
    """Also where torch is installed: `--help` must be quick."""
    code = (
        "import sys, everlong.cli.main, everlong.cli.config, everlong.cli.compose, everlong.cli.train, everlong.cli.bench;"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
