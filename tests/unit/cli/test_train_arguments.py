"""`everlong train`: files, overrides, unknown names, what is refused before anything starts."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from everlong.cli.arguments import parse_config
from everlong.cli.config import RunConfig
from everlong.cli.main import main
from everlong.cli.toml import config_text, read_config
from everlong.environments.tasks.terminal.generate import Split, make_terminal
from everlong.trainer.config import GrpoConfig, RatioConfig, TokenMask, TokenTruncation

TWO_UPDATES = {"updates_per_batch": 2}


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of `everlong train` with these arguments, which must stop with exit code 2."""
    with pytest.raises(SystemExit) as stopped:
        main(["train", *arguments])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        (["--optimizer.learnign-rate", "3e-4"], "--optimizer.learning-rate"),
        (["--learnign_rate", "3e-4"], "--optimizer.learning-rate"),
        (["--trainer.optimzer", "adam"], "--optimizer"),
        (["--sampling.temprature=0.5"], "--sampling.temperature"),
        (["--schedule.num-batch", "2"], "--schedule.num-batches"),
        (["--ouput", "x"], "--output"),
        (["--loss.clip-hihg", "0.3", "--loss.type", "grpo"], "--loss.clip-high"),
        (["--ratio.correction.capp", "3"], "--ratio.correction.cap"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_an_unknown_option_fails_with_the_nearest_name(words, nearest, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert f"did you mean {nearest}?" in refused([*words, "--dry-run"], capsys)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[optimizer]\nlearnign_rate = 3e-4\n",
            "there is no setting --optimizer.learnign-rate: did you mean --optimizer.learning-rate?",
        ),
        ("learnign_rate = 3e-4\n", "there is no setting --learnign-rate: did you mean --optimizer.learning-rate?"),
        ("[optimzer]\nlearning_rate = 3e-4\n", "there is no setting --optimzer: did you mean --optimizer?"),
        ("[optimizer]\nlearning_rate = -1.0\n", "--optimizer.learning-rate: Input should be greater than 0, got -1.0"),
        ("[loss]\ntype = 'trpo'\n", "'trpo'"),
        ("seed = \n", "Invalid TOML"),
    ],
)
def test_a_bad_file_fails_with_its_mistake(text, message, tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert message in refused(["@", str(path)], capsys)
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_file_is_named(capsys) -> None:
    assert "missing.toml" in refused(["@", "missing.toml"], capsys)


def test_a_folder_is_no_file(tmp_path: Path, capsys) -> None:
    assert str(tmp_path) in refused(["@", str(tmp_path)], capsys)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--seed", "-1"], "--seed"),
        (["--schedule.num-batches", "-2"], "--schedule.num-batches"),
        (["--sampling.temperature", "-0.5"], "--sampling.temperature"),
        (["--sampling.temperature", "nan"], "--sampling.temperature"),
        (["--schedule.group-size", "2.5"], "--schedule.group-size"),
        (["--numerics", "exact"], "--numerics"),
        (["--weights.store", "memory://"], "--weights.store"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_bad_value_names_its_option(words, option, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused([*words, "--dry-run"], capsys).startswith(f"error: {option}: ")


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (
            '[{"type": "embedded", "max_runing": 3}]',
            "--engine.members[0]: max_runing is no setting of type embedded: did you mean max_running?",
        ),
        ('[{"type": "embedded", "url": "http://x"}]', "--engine.members[0]: url is no setting of type embedded"),
        (
            '[{"type": "vllm", "max_running": 0}]',
            "--engine.members[0].max_running: Input should be greater than or equal to 1, got 0",
        ),
        ('[{"type": "embedded"}, {"type": "pool"}]', "--engine.members[1]: Input tag 'pool' found"),
        ('{"type": "embedded"}', "--engine.members: expected a list, written in [ ], got {'type': 'embedded'}"),
        ("[]", "--engine.members: expected 1 or more of them, got []"),
    ],
    ids=["unknown name", "of another type", "bad value", "a pool", "no list", "nothing"],
)
def test_a_mistake_in_a_list_of_tables_is_said_once_with_its_place_in_the_list(
    members, said, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(["--engine.type", "pool", "--engine.members", members, "--dry-run"], capsys)
    assert message.startswith(f"error: {said}") and message.count("\n") == 1


def test_dotted_options_override_the_file_and_pick_a_variant(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("seed = 5\n[ratio]\nbase = 'proximal'\n[trainer]\nupdates_per_batch = 2\n")
    words = "--loss.type grpo --loss.clip-high .3 --ratio.correction.type token_mask --ratio.correction.low 0.25"
    config = parse_config(
        ["@", str(path), *words.split(), "--no-engine.prefix-cache", "--schedule.batch-deadline-s=None"]
    )
    assert config.seed == 5
    assert config.loss == GrpoConfig(clip_high=0.3)
    assert config.ratio.correction == TokenMask(low=0.25)
    assert config.engine.prefix_cache is False
    assert config.schedule.batch_deadline_s is None


def test_a_value_may_stand_behind_an_equals_sign_in_every_table(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = "--schedule.type=async --schedule.max-staleness=3 --loss.type=grpo --loss.clip-low=1e-1 --no-engine.prefix-cache"
    config = parse_config([*words.split(), '--tasks.train=["a=b", "c"]', "--seed=4"])
    assert (config.schedule.type, config.schedule.max_staleness, config.schedule.num_batches) == ("async", 3, 20)
    assert config.loss == GrpoConfig(clip_low=0.1)
    assert ([str(path) for path in config.tasks.train], config.seed) == (["a=b", "c"], 4)


def test_an_option_of_another_variant_is_refused(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    message = refused(["--dry-run", "--loss.clip-high", "0.3"], capsys)
    assert message == "error: --loss.clip-high is no setting of type sapo\n"


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(),
        RunConfig.model_validate(
            {
                "output": 'odd "name"\\with\nlines',
                "harness": {"system_prompt": 'say "no"\n\\', "tool_syntax": "hermes"},
                "schedule": {"batch_deadline_s": None},
                "loss": {"type": "grpo", "dual_clip": None},
                "ratio": {"base": "proximal", "correction": {"type": "token_truncation", "cap": 3.0}},
                "trainer": {"updates_per_batch": 2},
                "optimizer": {"max_grad_norm": None, "eps": 1e-20},
                "tasks": {"train": ["a", "b c"]},
            }
        ),
    ],
    ids=["defaults", "everything odd"],
)
def test_the_resolved_file_reads_back_as_the_same_config(config: RunConfig, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(config_text(config))
    assert read_config(path) == config
    assert parse_config(["@", str(path)]) == config


def leaves(settings: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            yield from leaves(value, (*path, name))
        else:
            yield (*path, name)


@pytest.mark.parametrize(
    "config",
    [
        RunConfig(),
        RunConfig(loss=GrpoConfig(), ratio=RatioConfig(base="proximal", correction=TokenMask()), trainer=TWO_UPDATES),
        RunConfig(ratio=RatioConfig(base="proximal", correction=TokenTruncation()), trainer=TWO_UPDATES),
    ],
    ids=["sapo", "grpo and mask", "truncation"],
)
def test_every_setting_is_in_the_resolved_file(config: RunConfig) -> None:
    written = tomllib.loads(config_text(config))
    for path in leaves(config):
        table = written
        for name in path:
            assert name in table, ".".join(path)
            table = table[name]


def test_dry_run_prints_the_resolved_file_and_starts_nothing(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--dry-run", "--output", "runs/mine", "--sampling.top-p", "0.95"])
    assert not stopped.value.code
    printed = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run.toml").write_text(printed)
    assert tomllib.loads(printed)["threads"] == "None"
    config = parse_config(["@", "run.toml"])
    assert config == parse_config(["--output", "runs/mine", "--sampling.top-p", "0.95"])
    assert config.tasks.train == (Path("runs/mine/tasks/train"),)


WARM = "[warmup]\nnum_batches = 5\ntraces_per_batch = 4\n[optimizer]\nsupervised_learning_rate = 0.01\n"
TASKS = "[tasks]\ntrain = 'a'\neval = 'b'\n"
SWITCHES = {
    "the warm-up": (WARM, "--warmup.num-batches 0", "num_batches = 5", "num_batches = 0"),
    "the deadline": (
        "[schedule]\nbatch_deadline_s = 9.0\non_deadline = 'replace'\n",
        "--schedule.batch-deadline-s=None",
        "batch_deadline_s = 9.0",
        "batch_deadline_s = 'None'",
    ),
    "evaluation": (TASKS + "[schedule]\neval_every = 2\n", "--tasks.eval []", "eval = 'b'", "eval = []"),
    "the network": (
        "[model]\ntype = 'toy'\n[loss]\ntype = 'grpo'\n[engine]\nmax_running = 3\n",
        "--model.type scripted",
        "'toy'",
        "'scripted'",
    ),
    "several branches": (
        "[trainer]\nshared_prefix = 'sum_over_leaves'\n\n[admission]\nmax_branches = 5\n",
        "--admission.max-branches 1",
        "branches = 5",
        "branches = 1",
    ),
    "real sandboxes": ("[sandbox]\ntype = 'local'\nroot = 'x'\n", "--sandbox.type scripted", "'local'", "'scripted'"),
}


@pytest.mark.parametrize("part", SWITCHES)
def test_an_option_switches_off_what_the_file_sets_and_a_file_alone_does_not(part, tmp_path: Path, capsys) -> None:
    text, option, on, off = SWITCHES[part]
    path = tmp_path / "run.toml"
    path.write_text(text)
    config = parse_config(["@", str(path), *option.split()])
    path.write_text(text.replace(on, off))
    assert "has no effect" in refused(["@", str(path)], capsys)
    path.write_text(config_text(config))
    assert read_config(path) == config, "the resolved file holds nothing without effect"


def test_an_option_without_effect_beside_its_own_switch_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "run.toml").write_text(WARM)
    words = ["@", str(tmp_path / "run.toml"), "--warmup.num-batches", "0", "--warmup.traces-per-batch", "9"]
    message = refused(words, capsys)
    assert "warmup.traces_per_batch has no effect" in message and "supervised_learning_rate" not in message


def test_the_quickstarts_warm_up_can_be_switched_off(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse_config(["--warmup.num-batches", "0"])
    assert (config.warmup.num_batches, config.optimizer.supervised_learning_rate) == (0, None)


def test_own_training_tasks_leave_the_quickstart_its_held_out_ones(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tasks = parse_config(["--tasks.train", "mine", "--output", "runs/mine"]).tasks
    assert tasks.train == (Path("mine"),)
    assert tasks.eval == (Path("runs/mine/tasks/eval"),)


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--output", str(tmp_path)])
    assert stopped.value.code == 1
    assert f"{tmp_path} holds a run already: `everlong resume {tmp_path}`" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_missing_tasks_are_named_before_the_run_exists(tmp_path: Path, capsys) -> None:
    missing, output = tmp_path / "no-tasks", tmp_path / "run"
    (tmp_path / "run.toml").write_text(f"output = '{output}'\n[tasks]\ntrain = '{missing}'\n")
    with pytest.raises(SystemExit) as stopped:
        main(["train", "@", str(tmp_path / "run.toml")])
    assert stopped.value.code in (1, 2)
    assert str(missing) in capsys.readouterr().err
    assert not output.exists()


def test_a_file_given_as_tasks_is_named(tmp_path: Path, capsys) -> None:
    raw = tmp_path / "rows.jsonl"
    raw.write_text('{"prompt": "hello"}\n')
    (tmp_path / "run.toml").write_text(f"output = '{tmp_path}/run'\n[tasks]\ntrain = '{raw}'\n")
    with pytest.raises(SystemExit) as stopped:
        main(["train", "@", str(tmp_path / "run.toml")])
    assert stopped.value.code in (1, 2)
    assert str(raw) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_batches_without_training_tasks_are_refused_before_the_run_exists(tmp_path: Path, capsys) -> None:
    (tmp_path / "run.toml").write_text(f"output = '{tmp_path}/run'\n")
    assert "no training tasks: give tasks.train" in refused(["@", str(tmp_path / "run.toml")], capsys)
    assert not (tmp_path / "run").exists()


def test_held_out_tasks_that_also_train_are_refused(tmp_path: Path, capsys) -> None:
    tasks = tmp_path / "tasks"
    make_terminal(tasks, 2, seed=0, split=Split.TRAIN, kinds=("write-word",))
    words = ["--tasks.train", str(tasks), "--tasks.eval", str(tasks), "--output", str(tmp_path / "run")]
    assert "are also train tasks" in refused(words, capsys)
    assert not (tmp_path / "run").exists()
