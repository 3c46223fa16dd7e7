"""A reward of one's own: what it is given, and what counts as a verdict."""

import asyncio
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from everlong.contracts.errors import Reason
from everlong.contracts.records import Verdict
from everlong.environments.grading import grader
from everlong.environments.grading.config import GradingConfig
from everlong.environments.grading.grader import Grader, Submission, open_grader, verifier
from everlong.environments.sandboxes.scripted import ScriptedBackend
from everlong.environments.tasks.harbor import read_task
from everlong.environments.tasks.opening import open_task
from everlong.environments.tasks.terminal.generate import make_terminal


async def by_length(submission: Submission) -> Verdict:
    return Verdict(reward=float(len(submission.answers)))


async def a_number(submission: Submission) -> float:
    return 0.5


async def infinite(submission: Submission) -> Verdict:
    return Verdict(reward=float("inf"))


async def endless(submission: Submission) -> Verdict:
    await asyncio.Event().wait()
    return Verdict(reward=1.0)


async def out_of_time_itself(submission: Submission) -> Verdict:
    raise TimeoutError("a judge did not answer")


def gives(**fields: object) -> Grader:
    async def own(submission: Submission) -> Verdict:
        return Verdict(**{"reward": 1.0, **fields})  # ty: ignore[invalid-argument-type]

    return own


WRONG = {
    "a_bool": {"reward": True},
    "a_text": {"reward": "1"},
    "not_a_number": {"reward": float("nan")},
    "huge": {"reward": 1e300},
    "a_flag_of_letters": {"flags": "cheat"},
    "a_flag_that_is_none": {"flags": ("a", 3)},
    "a_reason_of_its_own": {"reason": "timeout"},
    "no_output": {"output": None},
    "half_a_character": {"output": "\ud800"},
}


@pytest.fixture(autouse=True)
def own_graders(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("own_graders")
    module.__dict__.update(
        by_length=by_length, a_number=a_number, infinite=infinite, endless=endless, late=out_of_time_itself, word="no"
    )
    module.__dict__.update(
        {name: gives(**fields) for name, fields in WRONG.items()}, numpys=gives(reward=np.float32(0.5))
    )
    monkeypatch.setitem(sys.modules, "own_graders", module)


@pytest.fixture
async def submission(tmp_path: Path) -> Submission:
    task = read_task(make_terminal(tmp_path / "tasks", 1)[0])
    sandbox = await open_task(task, ScriptedBackend(), "graded")
    return Submission(task=task, sandbox=sandbox, answers=("$ ls", "done"))


def test_the_verifier_is_what_grades_without_a_word():
    assert open_grader(GradingConfig()) is verifier


async def test_an_own_grader_sees_what_the_model_said(submission: Submission):
    verdict = await open_grader(GradingConfig(type="own_graders:by_length"))(submission)
    assert verdict == Verdict(reward=2.0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_number", r"must return a Verdict such as Verdict\(reward=0.5\), got 0.5"),
        ("infinite", "must give a finite reward"),
    ],
)
async def test_what_is_no_verdict_is_an_error_of_the_grader(name: str, message: str, submission: Submission):
    with pytest.raises((TypeError, ValueError), match=f"own_graders:{name} {message}"):
        await open_grader(GradingConfig(type=f"own_graders:{name}"))(submission)


@pytest.mark.parametrize("name", WRONG)
async def test_a_verdict_that_could_not_be_stored_is_an_error_of_the_grader(name: str, submission: Submission):
    with pytest.raises((TypeError, ValueError), match=f"own_graders:{name} must"):
        await open_grader(GradingConfig(type=f"own_graders:{name}"))(submission)


async def test_a_numpy_number_is_a_reward(submission: Submission):
    verdict = await open_grader(GradingConfig(type="own_graders:numpys"))(submission)
    assert verdict == Verdict(reward=0.5) and type(verdict.reward) is float


async def test_a_grader_that_does_not_end_gives_no_verdict(submission: Submission, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grader, "MARGIN_S", -submission.task.task.verifier_timeout_s)
    verdict = await open_grader(GradingConfig(type="own_graders:endless"))(submission)
    assert (verdict.reward, verdict.reason) == (None, Reason.VERIFIER_TIMEOUT)


async def test_a_time_out_of_the_grader_itself_is_not_taken_for_the_tasks_limit(submission: Submission):
    with pytest.raises(TimeoutError, match="a judge did not answer"):
        await open_grader(GradingConfig(type="own_graders:late"))(submission)


def test_a_name_that_is_no_grader_is_refused():
    with pytest.raises(ValueError, match="grading.type=own_graders:word must name an async function of a submission"):
        open_grader(GradingConfig(type="own_graders:word"))
    for path in ("verifyer", "a b:c", "own_graders:", "own-graders:x"):
        with pytest.raises(ValidationError, match="should match pattern"):
            GradingConfig(type=path)
