"""What `everlong train` without arguments sets up."""

from pathlib import Path

import pytest

from everlong.cli.arguments import parse_config
from everlong.cli.quickstart import prepare_quickstart, quickstart_config, quickstart_tasks, tasks_for
from everlong.cli.run_folder import RunFolder
from everlong.models.config import ToyModel, ToyMoeModel
from everlong.trainer.config import ReplayConfig


def instructions(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.glob("*/instruction.md"))]


@pytest.mark.parametrize("model_type", ["toy", "smollm2"])
def test_quickstart_makes_its_tasks_once_and_trains_on_no_held_out_one(model_type: str, tmp_path: Path) -> None:
    """Writes a thousand small folders, which takes a second."""
    config = quickstart_config(model_type).model_copy(update={"output": tmp_path, "tasks": quickstart_tasks(tmp_path)})
    prepare_quickstart(config, RunFolder(tmp_path))
    made = tasks_for(config.model)
    train, held_out = instructions(tmp_path / "tasks" / "train"), instructions(tmp_path / "tasks" / "eval")
    assert (len(set(train)), len(set(held_out))) == (made.num_train, made.num_eval)
    assert not set(train) & set(held_out)
    kinds = {path.name.rpartition("-")[0] for path in (tmp_path / "tasks" / "train").iterdir()}
    assert kinds == set(made.kinds)
    marker = tmp_path / "tasks" / "eval" / "mine"
    marker.mkdir()
    prepare_quickstart(config, RunFolder(tmp_path))
    assert marker.exists(), "tasks that are there stay as they are"


@pytest.mark.parametrize("model_type", ["toy", "smollm2"])
def test_quickstart_learns_from_rewards_more_carefully_than_from_the_oracle(model_type: str) -> None:
    optimizer = quickstart_config(model_type).optimizer
    assert optimizer.supervised_learning_rate is not None
    assert optimizer.learning_rate < optimizer.supervised_learning_rate


def test_quickstart_names_a_folder_that_does_not_exist(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart-1").mkdir(parents=True)
    assert quickstart_config().output == Path("runs/quickstart-2")


def test_the_quickstart_of_a_language_model_shows_few_oracles_and_evaluates_two_hundred_variants() -> None:
    config = quickstart_config()
    made = tasks_for(config.model)
    assert config.model.type == "smollm2" and made.num_eval >= 200
    assert config.warmup.num_tasks is not None and config.warmup.num_tasks < made.num_train


@pytest.mark.parametrize("arguments", [[], ["--model.type", "smollm2"], ["--model.type", "toy"]], ids=" ".join)
def test_the_command_line_without_a_file_is_the_quickstart(arguments: list[str]) -> None:
    assert parse_config(arguments) == quickstart_config(*arguments[1:])
    assert parse_config([*arguments, "--seed", "7"]).model == quickstart_config(*arguments[1:]).model


def test_the_toy_with_experts_has_the_toys_quickstart() -> None:
    config = parse_config(["--model.type", "toy-moe", "--model.router", "sigmoid", "--replay.routes", "rollout"])
    assert config.model == ToyMoeModel(router="sigmoid") and config.replay.routes == "rollout"
    assert config.model_copy(update={"model": ToyModel(), "replay": ReplayConfig()}) == quickstart_config("toy")
    assert tasks_for(config.model) == tasks_for(ToyModel())


def test_tasks_of_ones_own_are_all_shown_unless_a_number_is_given() -> None:
    assert parse_config(["--tasks.train", "mine"]).warmup.num_tasks is None
    assert parse_config(["--tasks.train", "mine", "--warmup.num-tasks", "7"]).warmup.num_tasks == 7
    assert parse_config(["--output", "elsewhere"]).warmup.num_tasks == quickstart_config().warmup.num_tasks
