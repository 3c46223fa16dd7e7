"""What a run remembers of where it was started."""

from pathlib import Path

import pytest

from everlong.cli.origin import origin_of, read_origin, refuse_other_tasks, write_origin
from everlong.environments.tasks.config import TasksConfig
from everlong.environments.tasks.sources import RunTasks, read_run_tasks
from everlong.environments.tasks.terminal.generate import Split, make_terminal


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, list[Path]]:
    return {split: make_terminal(tmp_path / split, 3, split=split) for split in (Split.TRAIN, Split.EVAL)}


def read(tmp_path: Path) -> RunTasks:
    return read_run_tasks(TasksConfig(train=(tmp_path / "train",), eval=(tmp_path / "eval",)))


def test_an_origin_reads_as_it_was_written(tmp_path: Path, folders: dict[str, list[Path]]) -> None:
    origin = origin_of(read(tmp_path))
    write_origin(origin, tmp_path / "origin.json")
    assert read_origin(tmp_path / "origin.json") == origin
    assert read_origin(tmp_path / "nothing.json") is None
    (tmp_path / "origin.json").write_text("{")
    with pytest.raises(ValueError, match="origin.json is damaged"):
        read_origin(tmp_path / "origin.json")


def test_the_same_tasks_are_let_through(tmp_path: Path, folders: dict[str, list[Path]]) -> None:
    refuse_other_tasks(origin_of(read(tmp_path)), read(tmp_path))


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("what", ["changed", "gone", "new"])
def test_another_task_is_refused_by_name(split: str, what: str, tmp_path: Path, folders: dict[str, list[Path]]) -> None:
    origin, before = origin_of(read(tmp_path)), read(tmp_path)
    first = next(iter(getattr(before, split)))
    if what == "changed":
        Path(first.task.folder, "instruction.md").write_text("Do something else.")
    elif what == "gone":
        Path(first.task.folder).rename(tmp_path / "elsewhere")
    else:
        origin = {"train": origin.train, "eval": origin.eval}[split].pop(first.id) and origin
    with pytest.raises(ValueError, match=f"task {first.id} .*{what}|{what}.* task {first.id} |task {first.id} changed"):
        refuse_other_tasks(origin, read(tmp_path))
    changed = origin.changed(getattr(read(tmp_path), split))
    assert [task.id for task in changed] == ([first.id] if what == "changed" else [])


def test_the_number_of_other_tasks_is_said(tmp_path: Path, folders: dict[str, list[Path]]) -> None:
    origin = origin_of(read(tmp_path))
    for folder in folders[Split.TRAIN]:
        (folder / "instruction.md").write_text("Do something else.")
    with pytest.raises(ValueError, match=", and 2 more"):
        refuse_other_tasks(origin, read(tmp_path))
