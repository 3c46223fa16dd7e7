"""Which episodes `everlong view` lists."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from everlong.cli.config import RunConfig
from everlong.cli.run_folder import RunFolder
from everlong.cli.selecting import Wanted, select_episodes
from everlong.cli.view import view_command
from everlong.contracts.records import Purpose
from everlong.ledger import (
    BatchView,
    EpisodeStarted,
    EpisodeState,
    EpisodeView,
    GroupOpened,
    GroupView,
    Ledger,
    RunStarted,
)


def view(name: str, group: int, task: str, reward: float | None, purpose=Purpose.TRAIN) -> EpisodeView:
    state = EpisodeState.FAILED if reward is None else EpisodeState.TRAINED
    return EpisodeView(
        episode=name, purpose=purpose, group=group, attempt=0, task=task, state=state, incarnation=0, reward=reward
    )


EPISODES = [
    view("a", 0, "terminal/write-word/17", 1.0),
    view("b", 1, "terminal/make-folder/2", 0.0),
    view("c", 2, "terminal/write-word/9", None),
    view("d", 0, "humaneval/HumanEval_0", 0.25, Purpose.EVAL),
]
LIFECYCLE = SimpleNamespace(
    episodes={each.episode: each for each in EPISODES},
    groups={
        (each.purpose, each.group): GroupView(
            purpose=each.purpose, group=each.group, task=each.task, content_hash="", batch=batch
        )
        for each, batch in zip(EPISODES, (2, 2, 3, None), strict=True)
    },
    batches={n: BatchView(batch=n, groups=groups) for n, groups in enumerate([(), (), (0, 1), (2,)])},
)


def found(**wanted) -> str:
    return "".join(each.episode for each in select_episodes(LIFECYCLE, Wanted(**wanted), num_warmup=2))


@pytest.mark.parametrize(
    ("wanted", "episodes"),
    [
        ({}, "abcd"),
        ({"task": "terminal/write-word/17"}, "a"),
        ({"task": "write-word"}, "ac"),
        ({"task": "terminal/write-word"}, "ac"),
        ({"task": "terminal/"}, "abc"),
        ({"batch": 1}, "ab"),
        ({"batch": 2}, "c"),
        ({"reward": 0.0}, "b"),
        ({"failed": True}, "c"),
        ({"task": "write-word", "batch": 1}, "a"),
        ({"task": "write-word", "reward": 0.0}, ""),
    ],
)
def test_episodes_answer_to_all_that_is_asked(wanted: dict, episodes: str) -> None:
    assert found(**wanted) == episodes


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (
            {"task": "terminal/write"},
            r"no episode is of a task 'terminal/write': there are humaneval, .*write-word \(2\)",
        ),
        ({"batch": 0}, "there is no RL batch 0: there are 1 to 2"),
        ({"batch": 3}, "there is no RL batch 3: there are 1 to 2"),
        ({"reward": 2.0}, "no episode has the reward 2: there are 0, 0.25, 1"),
    ],
)
def test_what_does_not_exist_is_an_error_that_names_what_does(wanted: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        found(**wanted)


@pytest.mark.parametrize(
    ("limit", "every", "message"), [(3, True, "exclude each other"), (0, False, "--limit must be at least 1, got 0")]
)
def test_a_limit_that_means_nothing_is_refused(tmp_path, limit: int, every: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        view_command(tmp_path, "", Wanted(), limit, every)


@pytest.fixture
def run_of_250(tmp_path: Path) -> Path:
    folder = RunFolder(tmp_path)
    folder.create(RunConfig())
    ledger = Ledger.open(folder.ledger)
    group = GroupOpened(purpose=Purpose.TRAIN, group=0, task="terminal/write-word/17", content_hash="")
    starts = [
        EpisodeStarted(
            episode=f"train-000000-{n:03d}", group=0, attempt=n, purpose=Purpose.TRAIN, task=group.task, incarnation=0
        )
        for n in range(250)
    ]
    ledger.append(RunStarted(seed=0, config_hash="", tasks_hash=""), group, *starts)
    ledger.close()
    return tmp_path


@pytest.mark.parametrize(
    ("limit", "every", "rows", "said"),
    [
        (None, False, 200, "showing 200 of 250 episodes, the last ones; --all shows every one"),
        (3, False, 3, "showing 3 of 250 episodes, the last ones; --all shows every one"),
        (None, True, 250, "showing 250 of 250 episodes"),
    ],
)
def test_how_many_of_how_many_are_listed_is_said(
    run_of_250: Path, limit: int | None, every: bool, rows: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    view_command(run_of_250, "", Wanted(), limit, every)
    printed = capsys.readouterr().out
    assert printed.count("train-000000-") == rows and "train-000000-249" in printed
    assert printed.splitlines()[-1] == said


def test_an_option_that_chooses_episodes_is_refused_beside_one_episode(run_of_250: Path) -> None:
    with pytest.raises(ValueError, match="have no effect on one of them"):
        view_command(run_of_250, "train-000000-000", Wanted(reward=1.0), None, False)
