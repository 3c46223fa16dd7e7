"""The start of a run: what is refused is refused before anything is written, by a dry run too, and leaves nothing."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from everlong.cli import start_checks
from everlong.cli.arguments import parse_config
from everlong.cli.config import RunConfig
from everlong.cli.fresh_folder import FreshFolder
from everlong.cli.main import main
from everlong.cli.origin import origin_of
from everlong.cli.quickstart import QuickstartTasks
from everlong.cli.run_folder import RunFolder
from everlong.cli.store_owner import claim_store
from everlong.contracts.errors import SandboxError, WorkerDied
from everlong.environments.tasks.harbor import HarborTask, read_task
from everlong.environments.tasks.sources import RunTasks
from everlong.environments.tasks.terminal.generate import Split, make_terminal

SCRIPTED = {"--model.type": "scripted", "--sandbox.type": "scripted"}
"""Unless a case says otherwise."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Task folders: `mine` to train, `held-out`, `unproven` without an oracle, and `broken` ones."""
    folder = tmp_path_factory.mktemp("made")
    make_terminal(folder / "mine", 2, split=Split.TRAIN, kinds=("write-word",))
    make_terminal(folder / "held-out", 2, split=Split.EVAL, kinds=("write-word",))
    for name, lost in (("unproven", "solution/solve.sh"), ("broken", "instruction.md")):
        for path in make_terminal(folder / name, 2, kinds=("write-word",)):
            (path / lost).unlink()
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    return folder


REFUSED = {
    "output below a file": ("--output MADE/file/run", "MADE/file is none"),
    "output is a file": ("--output MADE/file", "MADE/file is none"),
    "store is a file": ("--weights.store MADE/file", "--weights.store MADE/file: a folder was expected"),
    "root of sandboxes is a file": ("--sandbox.root MADE/file --sandbox.type local", "--sandbox.root MADE/file"),
    "no tasks there": ("--tasks.train MADE/missing", "MADE/missing"),
    "no tasks in it": ("--tasks.train MADE/empty", "MADE/empty"),
    "unreadable tasks": ("--tasks.train MADE/broken", "instruction.md"),
    "unreadable held-out tasks": ("--tasks.eval MADE/broken", "instruction.md"),
    "tasks without oracle": ("--tasks.train MADE/unproven --tasks.eval MADE/held-out", "has no oracle"),
    "more demonstrations than tasks": (
        "--tasks.train MADE/mine --tasks.eval MADE/held-out --warmup.num-tasks 3",
        "tasks.train holds 2",
    ),
    "more demonstrations than own tasks": ("--warmup.num-tasks 901", "tasks.train holds 900"),
    "held-out tasks that train": ("--tasks.train MADE/mine --tasks.eval MADE/mine", "are also train tasks"),
    "too little time": ("--tasks.train MADE/mine --tasks.eval MADE/held-out --sandbox.ttl-s 5", "ttl"),
    "too little time for own tasks": ("--sandbox.ttl-s 5", "ttl"),
    "no such checkpoint": ("--model.type folder --model.path MADE/empty", "found no config.json in MADE/empty"),
    "no such harness": ("--harness.type nowhere:Agent", "nowhere"),
    "no such grading": ("--grading.type nowhere:judge", "nowhere"),
    "no such engine": ("--model.type toy --engine.type vllm --engine.python MADE/python", "MADE/python"),
    "no such engine in a pool": (
        '--model.type toy --engine.type pool --engine.members [{"type":"embedded"},{"type":"vllm","python":"MADE/python"}]',
        "MADE/python",
    ),
}


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_run_would_refuse_a_dry_run_refuses_and_nothing_is_left(
    name: str, dry: list[str], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    text, message = (part.replace("MADE", str(made)) for part in REFUSED[name])
    words = [*text.split(), *(word for item in SCRIPTED.items() if item[0] not in text for word in item)]
    before = sorted(made.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        main(["train", *words, *dry])
    assert stopped.value.code in (1, 2)
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err and printed.out == ""
    assert (list(tmp_path.iterdir()), sorted(made.rglob("*"))) == ([], before)


def test_a_folder_that_nobody_may_write_is_refused_first(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(SystemExit):
        main(["train", "--model.type", "scripted", "--output", str(tmp_path / "run")])
    assert f"{tmp_path} cannot be written by this user" in capsys.readouterr().err


def test_a_sandbox_that_cannot_run_here_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys) -> None:
    def broken(*arguments: object, **more: object) -> None:
        raise SandboxError("no sandbox can run here")

    monkeypatch.setattr(start_checks, "open_backend", broken)
    monkeypatch.chdir(tmp_path)
    for words in ([], ["--dry-run"]):
        with pytest.raises(SystemExit):
            main(["train", "--model.type", "scripted", *words])
        assert "no sandbox can run here" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


def test_a_dry_run_neither_converts_nor_downloads_a_model_and_says_so(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start_checks, "is_model_here", lambda model: False)
    monkeypatch.setattr(start_checks, "find_model", lambda model: pytest.fail("the model was opened"))
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--model.type", "toy", "--dry-run"])
    printed = capsys.readouterr()
    assert not stopped.value.code and "[model]" in printed.out
    assert "not checked: model.type=toy is not on this machine yet" in printed.err


@pytest.mark.parametrize("named", [True, False], ids=["named", "its own"])
def test_a_start_reads_every_task_once(
    named: bool, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the tasks that a run makes for itself a few are tried aside before."""
    reads: Counter[str] = Counter()

    def counted(folder: Path, *others: object) -> HarborTask:
        reads[str(folder.resolve())] += 1
        return read_task(folder, *others)

    def driven(config: RunConfig, folder: RunFolder, tasks: RunTasks, *others: object, **more: object) -> None:
        given.append(tasks)

    given: list[RunTasks] = []
    monkeypatch.setattr("everlong.environments.tasks.sources.read_task", counted)
    monkeypatch.setattr("everlong.cli.train._drive", driven)
    monkeypatch.setattr("everlong.cli.quickstart.TOY_TASKS", QuickstartTasks(("write-word",), 3, 2))
    mine = ["--tasks.train", str(made / "mine"), "--tasks.eval", str(made / "held-out")] if named else []
    output = tmp_path / "run"
    with pytest.raises(SystemExit):
        main(["train", "--model.type", "scripted", "--sandbox.type", "scripted", "--output", str(output), *mine])
    places = {task.task.folder for task in given[0].by_id().values()}
    assert {reads[place] for place in places} == {1} and len(places) == (4 if named else 5)
    assert RunFolder(output).read_origin() == origin_of(given[0])

    reads.clear()
    with pytest.raises(SystemExit):
        main(["resume", str(output)])
    assert reads == dict.fromkeys(places, 1) and given[1] == given[0]


# The folder ----------------------------------------------------------------------------------------------------------


def start(tmp_path: Path, *words: str) -> tuple[FreshFolder, RunFolder]:
    config = parse_config(["--model.type", "scripted", "--output", str(tmp_path / "deep" / "run"), *words])
    return FreshFolder(config, RunFolder(config.output)), RunFolder(config.output)


def write(folder: RunFolder, *names: str) -> None:
    for name in names:
        (folder.path / name).parent.mkdir(parents=True, exist_ok=True)
        (folder.path / name).write_text("")


WRITTEN = ("tasks/train/a/task.toml", "config.toml", "ledger.db", "worker.log")


@pytest.mark.parametrize("store", ["store", "other/store"])
def test_a_refused_start_takes_back_what_it_made_and_nothing_else(tmp_path: Path, store: str) -> None:
    fresh, folder = start(tmp_path, "--weights.store", str(tmp_path / "deep" / store))
    write(folder, "notes.txt", "tasks/mine/task.toml")
    config = parse_config(["--model.type", "scripted", "--weights.store", str(tmp_path / "deep" / store)])
    with pytest.raises(ValueError, match="no"), fresh:
        claim_store(config, folder)
        write(folder, *WRITTEN)
        raise ValueError("no")
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert left == [
        "deep", "deep/run", "deep/run/notes.txt", "deep/run/tasks", "deep/run/tasks/mine", "deep/run/tasks/mine/task.toml"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "written", "stays"),
    [
        (KeyboardInterrupt(), WRITTEN[:1], False),
        (KeyboardInterrupt(), WRITTEN, True),
        (SystemExit(130), WRITTEN, True),
        (WorkerDied("killed"), WRITTEN, True),
        (OSError("disk full"), WRITTEN, False),
    ],
    ids=["stopped before the run exists", "stopped", "stopped inside", "a crash keeps its log", "refused"],
)
def test_a_run_that_did_not_get_under_way_is_there_whole_or_not_at_all(
    tmp_path: Path, error: BaseException, written: tuple[str, ...], stays: bool
) -> None:
    fresh, folder = start(tmp_path)
    with pytest.raises(type(error)), fresh:
        write(folder, *written)
        raise error
    assert all((folder.path / name).exists() == stays for name in written)
    assert (tmp_path / "deep").exists() == stays


def test_a_run_under_way_keeps_everything(tmp_path: Path) -> None:
    fresh, folder = start(tmp_path)
    with pytest.raises(ValueError, match="later"), fresh as started:
        write(folder, *WRITTEN)
        started.keep()
        raise ValueError("later")
    assert all((folder.path / name).exists() for name in WRITTEN)


def test_two_runs_do_not_start_in_one_folder_and_the_second_harms_nothing(tmp_path: Path) -> None:
    (first, folder), (second, _) = start(tmp_path), start(tmp_path)
    with first as started:
        write(folder, *WRITTEN[:1])
        with pytest.raises(FileExistsError, match="another run starts"), second:
            pass
        started.keep()
    assert (folder.path / WRITTEN[0]).exists()
