"""The port of grading, and where a reward of one's own comes in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from numbers import Real
from typing import Protocol

from msgspec import structs

from everlong.contracts.errors import Reason
from everlong.contracts.import_path import load_named
from everlong.contracts.ports import Sandbox
from everlong.contracts.records import MAX_REWARD, Record, Turn, Verdict, decode_record, encode_record
from everlong.environments.grading.config import GradingConfig
from everlong.environments.grading.verifier import MARGIN_S, grade
from everlong.environments.tasks.harbor import HarborTask


class Submission(Record, frozen=True, kw_only=True, eq=False):
    """What an episode left behind, for grading.

    Example: Submission(task=task, sandbox=sandbox, turns=session.turns, answers=("$ wc -l a.txt", "done"))
    """

    task: HarborTask
    sandbox: Sandbox
    """As the agent left it; `grade` runs the task's verifier on a copy."""
    turns: tuple[Turn, ...] = ()
    answers: tuple[str, ...] = ()
    """What the model said, a text per turn, special tokens left out."""


class Grader(Protocol):
    """Async function from a submission to a verdict. A reward of None is no verdict: the episode does not train."""

    def __call__(self, submission: Submission) -> Awaitable[Verdict]: ...


async def verifier(submission: Submission) -> Verdict:
    """The task's own tests/test.sh. Never raises for a failure of sandbox or verifier: it is the reason."""
    return await grade(submission.task, submission.sandbox)


def open_grader(config: GradingConfig) -> Grader:
    """The grader that the config names. Raises ValueError where there is none."""
    if config.type == "verifier":
        return verifier
    own = load_named(config.type)
    if not callable(own):
        raise ValueError(f"grading.type={config.type} must name an async function of a submission, got {own!r}")

    async def bounded(submission: Submission) -> Verdict:
        """Raises TypeError, ValueError for what is no verdict, besides what the grader raises."""
        try:
            async with asyncio.timeout(submission.task.task.verifier_timeout_s + MARGIN_S) as limit:
                verdict = await own(submission)
        except TimeoutError:
            if not limit.expired():
                raise
            return Verdict(reward=None, reason=Reason.VERIFIER_TIMEOUT, output=f"{config.type} took too long")
        return _checked(verdict, config.type)

    return bounded


def _checked(verdict: object, name: str) -> Verdict:
    """The verdict as it can be stored and read back. Raises TypeError, ValueError for any other."""
    if not isinstance(verdict, Verdict):
        raise TypeError(f"{name} must return a Verdict such as Verdict(reward=0.5), got {verdict!r}")
    reward = verdict.reward
    if reward is not None:
        if isinstance(reward, bool) or not isinstance(reward, Real):
            raise TypeError(f"{name} must give a number as reward, or None for no verdict, got {reward!r}")
        reward = float(reward)
        if not abs(reward) <= MAX_REWARD:
            raise ValueError(
                f"{name} must give a finite reward of at most {MAX_REWARD:.3g}, or None for no verdict, got {reward}"
            )
    try:
        return decode_record(encode_record(structs.replace(verdict, reward=reward)), Verdict)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must return a Verdict whose fields have their types, got {verdict!r}: {error}"
        ) from error
