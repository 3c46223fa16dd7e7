from pathlib import Path

import pytest

from everlong.environments.tasks.config import TasksConfig
from everlong.environments.tasks.sources import read_run_tasks, read_tasks
from everlong.environments.tasks.terminal.generate import make_terminal


def test_tasks_come_in_the_order_of_paths_then_names(tmp_path: Path):
    made = sorted(make_terminal(tmp_path / "many", 6, seed=1))
    single = make_terminal(tmp_path / "one", 1, seed=2, kinds=("json-key",))[0]
    tasks = read_tasks([single, tmp_path / "many"])
    assert [task.task.folder for task in tasks] == [str(single), *map(str, made)]
    assert tasks.by_id()[tasks[0].id] == tasks[0]


def test_the_fingerprint_follows_content_and_order_not_place(tmp_path: Path):
    for name in ("a", "b"):
        make_terminal(tmp_path / name, 4, seed=3)
    paths = sorted((tmp_path / "a").iterdir())
    fingerprint = read_tasks(paths).fingerprint
    assert read_tasks([tmp_path / "b"]).fingerprint == fingerprint
    assert read_tasks(paths[::-1]).fingerprint != fingerprint
    (paths[0] / "instruction.md").write_text("Something else.")
    assert read_tasks(paths).fingerprint != fingerprint


def test_a_repeated_id_names_both_folders(tmp_path: Path):
    for name in ("a", "b"):
        make_terminal(tmp_path / name, 1)
    with pytest.raises(ValueError, match=r"task id terminal/write-word/\d+ is taken by .*/a/.* and .*/b/.*"):
        read_tasks([tmp_path / "a", tmp_path / "b"])


def test_a_held_out_task_that_also_trains_is_refused(tmp_path: Path):
    make_terminal(tmp_path / "train", 3)
    make_terminal(tmp_path / "eval", 3, split="eval")
    tasks = read_run_tasks(TasksConfig(train=(tmp_path / "train",), eval=(tmp_path / "eval",)))
    assert (len(tasks.train), len(tasks.eval), len(tasks.by_id())) == (3, 3, 6)
    with pytest.raises(ValueError, match="3 eval tasks are also train tasks"):
        read_run_tasks(TasksConfig(train=(tmp_path / "train",), eval=(tmp_path / "train",)))


def test_paths_without_tasks_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="found nothing there"):
        read_tasks([tmp_path / "missing"])
    with pytest.raises(FileNotFoundError, match="found none"):
        read_tasks([tmp_path])
    (tmp_path / "stray").mkdir()
    with pytest.raises(
        FileNotFoundError, match=r"task stray: expected the file .*/stray/task.toml, found an empty folder"
    ):
        read_tasks([tmp_path])
