"""The command line: help, exit codes, and errors that say what to do."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from cyclopts import Token

from everlong.cli.config import RunConfig
from everlong.cli.lists import split_paths
from everlong.cli.main import main
from everlong.cli.run_folder import RunFolder
from everlong.cli.toml import write_config

HELP = {
    "": ("train", "resume", "eval", "serve", "view", "report", "bench", "tasks", "ledger"),
    "train": ("--dry-run", "@ run.toml", "--optimizer.learning-rate", "--loss.clip-high", "--loss.tau-positive"),
    "resume": ("RUN",),
    "eval": ("--tasks", "--attempts", "--version", "--json"),
    "serve": ("--host", "--port", "--version", "--key", "--allow-remote"),
    "view": ("RUN", "EPISODE", "--task", "--batch", "--reward", "--failed", "--limit", "--all"),
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


def test_an_example_of_two_commands_is_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sft", "--help") == 0
    commands = [line.split()[:2] for line in capsys.readouterr().out.splitlines() if line.startswith(" everlong")]
    assert commands == [["everlong", "sft"], ["everlong", "train"]]


@pytest.mark.parametrize("command", ["eval", "serve"])
def test_help_says_that_versions_count_the_warm_up(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    assert "warm-up" in capsys.readouterr().out


MANY = {"repeated": "--kinds write-word --kinds make-folder", "with commas": "--kinds write-word,make-folder"}


@pytest.mark.parametrize("many", MANY.values(), ids=MANY)
def test_several_values_are_an_option_repeated_or_commas(many: str, tmp_path: Path) -> None:
    assert run("tasks", "make", "terminal", "--count", "2", "--out", str(tmp_path / "made"), *many.split()) == 0
    assert sorted(path.name.rpartition("-")[0] for path in (tmp_path / "made").iterdir()) == [
        "make-folder",
        "write-word",
    ]


def test_a_folder_with_a_comma_in_its_name_is_one_path(tmp_path: Path) -> None:
    (tmp_path / "a,b").mkdir()
    tokens = [Token(value=str(tmp_path / "a,b")), Token(value="c,d")]
    assert split_paths(None, tokens) == (tmp_path / "a,b", Path("c"), Path("d"))


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
    "tasks make terminal --count 1 --out OUT --kinds write-word,": "expected values with commas between them",
    "tasks check OUT": "OUT",
    "tasks show OUT": "OUT",
    "train run.toml": "a file of settings comes after @: `everlong train @ run.toml`",
    "sft --seed 3 run.toml": "`everlong sft @ run.toml`",
    "train --no-engine.prefix-cache run.toml": "`everlong train @ run.toml`",
    "serve OUT --host 0.0.0.0": "add --allow-remote",
    "serve OUT --port 99999": "--port must be 0 to 65535",
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


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded(tmp_path: Path, capsys) -> None:
    write_config(RunConfig(output=tmp_path), tmp_path / "config.toml")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run("serve", str(tmp_path), "--port", str(port)) == 1
    message = capsys.readouterr().err
    assert f"cannot listen at 127.0.0.1, port {port}: another program listens there" in message
    assert "Errno" not in message and "worker" not in message


RAW = {
    "eval RUN": IsADirectoryError(21, "Is a directory", "x"),
    "view RUN": PermissionError(13, "Permission denied", "x"),
}


@pytest.mark.parametrize("command", RAW)
def test_what_the_system_refuses_is_told_in_words(command: str, tmp_path: Path, monkeypatch, capsys) -> None:
    def refuses(folder: RunFolder) -> RunConfig:
        raise RAW[command]

    monkeypatch.setattr(RunFolder, "read_config", refuses)
    assert run(*command.replace("RUN", str(tmp_path)).split()) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: x: ") and RAW[command].strerror in message and "Errno" not in message


STOPPED_WHILE_IMPORTING = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "everlong.cli.main":
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass  # as libraries do that try an import
sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)
from everlong.cli.entry import main
main()
"""


def test_ctrl_c_while_the_command_loads_is_one_line() -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED_WHILE_IMPORTING], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_ctrl_c_in_any_command_is_one_line(tmp_path: Path, monkeypatch, capsys) -> None:
    def stopped(folder: RunFolder) -> RunConfig:
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "read_config", stopped)
    assert run("view", str(tmp_path)) == 130
    assert capsys.readouterr().err == "stopped\n"
