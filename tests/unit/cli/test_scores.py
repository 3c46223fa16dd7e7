"""What an evaluation says of its episodes."""

from pathlib import Path

import pytest

from everlong.cli.scores import score_rows, scores_of
from everlong.contracts.errors import Reason
from everlong.contracts.records import Episode, EpisodeOrder, Purpose, Task, Verdict
from everlong.environments.tasks.harbor import HarborTask
from everlong.environments.tasks.sources import TaskSet


def tasks_of(**kinds: str) -> TaskSet:
    tasks = [Task(id=id, folder=id, content_hash=id, instruction="Go.", kind=kind) for id, kind in kinds.items()]
    return TaskSet(tasks=tuple(HarborTask(task=task, tests=str(Path(task.id)), solution=None) for task in tasks))


def episodes_of(**rewards: list[float | None]) -> list[Episode]:
    return [
        Episode(
            order=EpisodeOrder(task=task, group=0, attempt=attempt, purpose=Purpose.EVAL),
            reason=Reason.DONE if reward is not None else Reason.SANDBOX_CRASH,
            verdict=Verdict(reward=reward, reason=None if reward is not None else Reason.SANDBOX_CRASH),
            turns=(),
        )
        for task, given in rewards.items()
        for attempt, reward in enumerate(given)
    ]


def test_success_has_its_interval_by_kind_and_in_all_and_no_mean_reward_says_the_same_again() -> None:
    tasks = tasks_of(a="find", b="find", c="write")
    scores = scores_of(episodes_of(a=[1, 0], b=[1, 1], c=[0, None]), tasks)
    assert score_rows(scores) == [
        ["kind", "tasks", "episodes", "success (95 %)"],
        ["find", "2", "4", "75 % (30 to 95)"],
        ["write", "1", "1", "0 % (0 to 79)"],
        ["all", "3", "5", "60 % (23 to 88)"],
    ]
    assert (scores.kinds["write"].without_verdict, scores.total.without_verdict) == (1, 1)
    assert scores.total.interval == pytest.approx((0.2307, 0.8824), abs=1e-4)


def test_the_mean_reward_stands_beside_where_a_reward_is_neither_0_nor_1() -> None:
    scores = scores_of(episodes_of(a=[1.5, 0.25]), tasks_of(a=""))
    assert score_rows(scores) == [
        ["kind", "tasks", "episodes", "success (95 %)", "mean reward"],
        ["all", "1", "2", "50 % (9 to 91)", "0.875"],
    ]


def test_a_kind_of_which_nothing_was_judged_has_no_success_of_0() -> None:
    scores = scores_of(episodes_of(a=[1], b=[None]), tasks_of(a="find", b=""))
    assert score_rows(scores)[2] == ["other", "1", "0", "no verdict"]
    assert (scores.kinds["other"].success, scores.kinds["other"].interval) == (None, None)
