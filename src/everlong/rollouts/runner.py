"""From an order to an episode: sandbox, session, harness, grading; every failure attributed to the one who caused it.

A failed episode is data and is returned, with its reason. Only what breaks the run itself goes on outwards: a worker
that died, a ledger that contradicts, and a cancellation.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from everlong.contracts.errors import EngineError, LedgerError, Reason, SandboxError, WorkerDied, WorkerError
from everlong.contracts.ports import Engine, Sandbox, SandboxBackend
from everlong.contracts.records import Episode, EpisodeOrder, SamplingParams, Task, Verdict
from everlong.environments.grading.grader import Grader, Submission, verifier
from everlong.environments.grading.verifier import check_time_budget
from everlong.environments.tasks.harbor import HarborTask
from everlong.environments.tasks.opening import open_task
from everlong.rollouts.config import ThinkingHistory
from everlong.rollouts.gateway.session import ContextFull, Journal, Session, SessionLimits, TurnLimit
from everlong.rollouts.leash import GRACE_S, contained, leashed
from everlong.rollouts.pausing import Pause
from everlong.rollouts.renderers.chatml import Renderer


class Harness(Protocol):
    """The agent loop."""

    async def run(self, task: Task, session: Session, sandbox: Sandbox) -> Reason:
        """Drive an episode to its end with `session.chat`, and say why it ended. What session and sandbox raise goes on."""
        ...


@dataclass(frozen=True, slots=True)
class Sampling:
    """How every turn of the run is sampled."""

    engine: Engine
    renderer: Renderer
    params: SamplingParams
    run_seed: int
    limits: SessionLimits
    pause: Pause = field(default_factory=Pause)
    """While it is on, nobody's time limit runs."""
    thinking: ThinkingHistory = "keep"


@dataclass(slots=True)
class _Attempt:
    """What is known of an episode while it runs."""

    reason: Reason = Reason.DONE
    verdict: Verdict = field(default_factory=lambda: Verdict(reward=None))
    error: str = ""
    session: Session | None = None

    def fail(self, reason: Reason) -> None:
        """Keeps the traceback of the exception that is being handled, as text that can be stored."""
        self.reason = reason
        self.error = traceback.format_exc().encode(errors="backslashreplace").decode()


class EpisodeRunner:
    def __init__(
        self,
        *,
        tasks: Mapping[str, HarborTask],
        backend: SandboxBackend,
        harness: Harness,
        sampling: Sampling,
        journal: Journal,
        ttl_s: float | None = None,
        grader: Grader = verifier,
    ) -> None:
        """`ttl_s`: after which a sandbox is closed, whatever happens. Raises ValueError where a task's limits need longer."""
        if ttl_s is not None:
            for task in tasks.values():
                check_time_budget(task.task.agent_timeout_s, task.task.verifier_timeout_s, ttl_s)
        self._ttl_s = ttl_s
        self._tasks, self._backend, self._harness = tasks, backend, harness
        self._sampling, self._journal = sampling, journal
        self._grader = grader

    async def run(self, order: EpisodeOrder) -> Episode:
        started = time.monotonic()
        attempt = _Attempt()
        try:
            name = f"{order.episode}.{order.incarnation}"
            sandbox = await open_task(self._tasks[order.task], self._backend, name, ttl_s=self._ttl_s)
        except SandboxError:
            attempt.fail(Reason.SANDBOX_CRASH)
        else:
            try:
                await self._act(order, attempt, sandbox)
                await self._grade(order, attempt, sandbox)
            finally:
                await self._close(attempt, sandbox)
        return self._episode(order, attempt, time.monotonic() - started)

    async def _close(self, attempt: _Attempt, sandbox: Sandbox) -> None:
        """What is left of a sandbox that does not close is swept with its backend: the verdict stands."""
        try:
            await asyncio.shield(sandbox.close())
        except SandboxError:
            attempt.error += traceback.format_exc()

    async def _act(self, order: EpisodeOrder, attempt: _Attempt, sandbox: Sandbox) -> None:
        task = self._tasks[order.task].task
        sampling = self._sampling
        session = attempt.session = Session(
            order,
            engine=sampling.engine,
            renderer=sampling.renderer,
            params=sampling.params,
            run_seed=sampling.run_seed,
            limits=sampling.limits,
            journal=self._journal,
            thinking=sampling.thinking,
        )
        try:
            async with asyncio.timeout(task.agent_timeout_s) as limit:
                with sampling.pause.spares(limit):
                    begin = partial(self._harness.run, task, session, sandbox)
                    attempt.reason = _checked(await leashed(begin, f"the harness of {order.episode}", GRACE_S))
            if session.refusal is not None:  # the agent met it and went its way: it still is why the episode ended
                raise session.refusal
        except TimeoutError:
            if limit.expired():
                attempt.reason = Reason.AGENT_TIMEOUT
            else:
                attempt.fail(Reason.HARNESS_CRASH)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            attempt.fail(Reason.HARNESS_CRASH)
        except Exception as error:
            _attribute(attempt, error)
        finally:
            await session.close()
        if attempt.reason.trustworthy and not session.turns:
            attempt.reason = Reason.NOTHING_SAMPLED

    async def _grade(self, order: EpisodeOrder, attempt: _Attempt, sandbox: Sandbox) -> None:
        """Grade what the agent left behind, also when its time or its context ran out. No verdict is not a reward of 0."""
        if not attempt.reason.trustworthy:
            attempt.verdict = Verdict(reward=None, reason=attempt.reason)
            return
        try:
            begin = partial(self._grader, self._submission(order, attempt, sandbox))
            attempt.verdict = await contained(begin, f"the grading of {order.episode}")
        except SandboxError:
            attempt.fail(Reason.SANDBOX_CRASH)
            attempt.verdict = Verdict(reward=None, reason=Reason.SANDBOX_CRASH)
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            attempt.fail(Reason.VERIFIER_CRASH)
            attempt.verdict = Verdict(reward=None, reason=Reason.VERIFIER_CRASH)
        if attempt.verdict.reason is not None:
            attempt.reason = attempt.verdict.reason

    def _submission(self, order: EpisodeOrder, attempt: _Attempt, sandbox: Sandbox) -> Submission:
        turns = attempt.session.turns if attempt.session else ()
        decode = self._sampling.renderer.tokenizer.decode
        answers = tuple(decode(turn.sampled.ids.tolist()) for turn in turns)
        return Submission(task=self._tasks[order.task], sandbox=sandbox, turns=turns, answers=answers)

    def _episode(self, order: EpisodeOrder, attempt: _Attempt, elapsed_s: float) -> Episode:
        session = attempt.session
        if session is None:
            attempt.verdict = Verdict(reward=None, reason=attempt.reason)
        return Episode(
            order=order,
            reason=attempt.reason,
            verdict=attempt.verdict,
            turns=session.turns if session else (),
            num_discarded=session.num_discarded if session else 0,
            elapsed_s=elapsed_s,
            metrics=_counts(session) if session else {},
            error=attempt.error,
        )


def _checked(reason: object) -> Reason:
    """Raises TypeError for what a harness may not return."""
    if not isinstance(reason, Reason):
        raise TypeError(
            f"harness.type must name a harness whose run returns a Reason, such as Reason.DONE, got {reason!r}"
        )
    return reason


def _is_cancelled() -> bool:
    """Whether this task was cancelled, and not only something that it waited for."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _attribute(attempt: _Attempt, error: Exception) -> None:
    """Who ended the episode. A harness may run its calls in a task group, which wraps what they raise.

    Called while `error` is handled; raises it where it breaks the run itself.
    """
    leaves = list(_leaves(error))

    def among(*kinds: type[BaseException]) -> bool:
        return any(isinstance(leaf, kinds) for leaf in leaves)

    if among(WorkerDied, WorkerError, LedgerError):
        raise error
    if among(SandboxError):
        attempt.fail(Reason.SANDBOX_CRASH)
    elif among(EngineError):
        attempt.fail(Reason.ENGINE_FAILURE)
    elif all(isinstance(leaf, (ContextFull, TurnLimit)) for leaf in leaves):
        attempt.reason = Reason.CONTEXT_FULL if among(ContextFull) else Reason.TURN_LIMIT
    else:
        attempt.fail(Reason.HARNESS_CRASH)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _counts(session: Session) -> dict[str, float]:
    """What the conversation met; a batch's row sums them."""
    return {
        "forks": float(session.num_forks),
        "stripped_prompts": float(session.num_stripped),
        "cut_calls": float(session.num_cut_calls),
        "uncounted_calls": float(session.num_uncounted),
    }
