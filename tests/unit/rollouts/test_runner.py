"""From an order to an episode: who ended it, whether its verdict may be believed, and that nothing sampled is lost."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from everlong.contracts.errors import LedgerError, Reason, SandboxError, WorkerDied, WorkerError
from everlong.contracts.ports import Command, ExecResult
from everlong.contracts.records import Episode, EpisodeOrder, GenerateRequest, Purpose, SamplingParams, Verdict
from everlong.engines.scripted import Fault, ScriptedEngine
from everlong.environments.grading.grader import Grader, Submission, verifier
from everlong.environments.sandboxes.scripted import ScriptedBackend, ScriptedSandbox, interpret
from everlong.environments.tasks.harbor import HarborTask, read_task
from everlong.environments.tasks.terminal.generate import make_terminal
from everlong.rollouts.config import HarnessConfig
from everlong.rollouts.gateway.session import SessionLimits
from everlong.rollouts.harnesses.bash import BashHarness
from everlong.rollouts.messages import Message
from everlong.rollouts.pausing import Pause
from everlong.rollouts.renderers.chatml import ChatML
from everlong.rollouts.renderers.tokenizers import ByteTokenizer
from everlong.rollouts.runner import EpisodeRunner, Harness, Sampling

BYTES = ByteTokenizer()
END = BYTES.special("<|im_end|>")
VERDICT = "/logs/verifier/reward.txt"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> HarborTask:
    return read_task(make_terminal(tmp_path_factory.mktemp("tasks") / "one", 1)[0])


@dataclass
class Journal:
    facts: list[tuple[str, int]] = field(default_factory=list)
    error: Exception | None = None

    async def turn_sampled(self, order: EpisodeOrder, turn: int, num_tokens: int) -> None:
        if self.error is not None:
            raise self.error
        self.facts.append((f"turn {turn}", num_tokens))

    async def tokens_discarded(self, order: EpisodeOrder, num_tokens: int, reason: str) -> None:
        self.facts.append((reason, num_tokens))

    async def call_uncounted(self, order: EpisodeOrder, max_tokens: int, reason: str) -> None:
        self.facts.append((f"uncounted, {reason}", 0))


def says(*answers: str) -> Callable[[GenerateRequest], list[int]]:
    return lambda request: [*BYTES.encode(answers[min(request.key.turn, len(answers) - 1)]), END]


@dataclass
class World:
    """One episode, with a verifier that writes what `verdict` says and an engine that says `answers`."""

    task: HarborTask
    answers: tuple[str, ...] = ("$ echo hi", "done")
    verdict: bytes | None = b"1"
    verifier_times_out: bool = False
    faults: tuple[Fault, ...] = ()
    harness: Harness | None = None
    grader: Grader = verifier
    max_turns: int = 8
    max_context: int = 3000
    agent_timeout_s: float = 30.0
    ttl_s: float | None = None
    journal: Journal = field(default_factory=Journal)
    pause: Pause = field(default_factory=Pause)
    respond: Callable[[ScriptedSandbox, Command], ExecResult] = interpret

    def __post_init__(self) -> None:
        self.backend = ScriptedBackend(self._run)
        self.engine = ScriptedEngine(says(*self.answers), token_bytes=BYTES.token_bytes(), policy_version=3)
        self.engine.inject(*self.faults)
        self.order = EpisodeOrder(task=self.task.id, group=0, attempt=0, purpose=Purpose.TRAIN)

    def _run(self, sandbox: ScriptedSandbox, command: Command) -> ExecResult:
        if command.argv != ("bash", "/tests/test.sh"):
            return self.respond(sandbox, command)
        if self.verdict is not None:
            sandbox.files[VERDICT] = self.verdict
        return ExecResult(exit_code=0, output=b"", timed_out=self.verifier_times_out)

    async def run(self) -> Episode:
        renderer = ChatML(BYTES)
        timed = msgspec.structs.replace(self.task.task, agent_timeout_s=self.agent_timeout_s)
        runner = EpisodeRunner(
            tasks={self.task.id: msgspec.structs.replace(self.task, task=timed)},
            backend=self.backend,
            harness=self.harness or BashHarness(HarnessConfig()),
            sampling=Sampling(
                engine=self.engine,
                renderer=renderer,
                params=SamplingParams(max_tokens=200, stop_ids=renderer.stop_ids),
                run_seed=0,
                limits=SessionLimits(max_turns=self.max_turns, max_context=self.max_context),
                pause=self.pause,
            ),
            journal=self.journal,
            ttl_s=self.ttl_s,
            grader=self.grader,
        )
        episode = await runner.run(self.order)
        assert not self.backend.sandboxes, "every sandbox is closed, whatever happened"
        told = sum(num_tokens for _, num_tokens in self.journal.facts)
        assert episode.num_sampled == told, "the episode and the journal count the same tokens"
        return episode


async def test_tokens_that_an_engine_counted_and_did_not_send_make_no_turn(task: HarborTask):
    episode = await World(task, faults=(Fault.LOSE,)).run()
    assert (episode.reason, episode.reward, episode.turns) == (Reason.ENGINE_FAILURE, None, ())
    assert episode.num_discarded == len(BYTES.encode("$ echo hi")) and "reported" in episode.error


async def test_an_answered_task_is_graded_and_every_turn_is_in_the_journal_first(task: HarborTask):
    world = World(task)
    episode = await world.run()
    assert (episode.reason, episode.reward, episode.error) == (Reason.DONE, 1.0, "")
    assert world.journal.facts == [("turn 0", 10), ("turn 1", 5)]
    assert episode.metrics == {"forks": 0.0, "stripped_prompts": 0.0, "cut_calls": 0.0, "uncounted_calls": 0.0}


async def test_a_failed_task_has_a_reward_of_0_that_teaches(task: HarborTask):
    episode = await World(task, verdict=b"0").run()
    assert (episode.reason, episode.reward) == (Reason.DONE, 0.0)


class Raises:
    """A harness that talks once, then breaks."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def run(self, task, session, sandbox) -> Reason:
        await session.chat([Message(role="user", content="u")])
        raise self.error


class InGroup(BashHarness):
    """Its calls run in a task group, which wraps what they raise."""

    async def run(self, task, session, sandbox) -> Reason:
        async with asyncio.TaskGroup() as group:
            group.create_task(super().run(task, session, sandbox))
        return Reason.DONE


class Cancels:
    """Waits for a task of its own that was cancelled."""

    async def run(self, task, session, sandbox) -> Reason:
        await session.chat([Message(role="user", content="u")])
        own = asyncio.ensure_future(asyncio.sleep(3600))
        own.cancel()
        await own
        return Reason.DONE


class Returns:
    def __init__(self, value: object) -> None:
        self.value = value

    async def run(self, task, session, sandbox) -> Reason:
        await session.chat([Message(role="user", content="u")])
        return self.value  # ty: ignore[invalid-return-type]


class InThread:
    """Waits for a thread of its own that raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def run(self, task, session, sandbox) -> Reason:
        await session.chat([Message(role="user", content="u")])
        await asyncio.to_thread(self.fail)
        return Reason.DONE

    def fail(self) -> None:
        raise self.error


class Silent:
    async def run(self, task, session, sandbox) -> Reason:
        return Reason.DONE


def dying(sandbox: ScriptedSandbox, command: Command) -> ExecResult:
    sandbox.die()
    raise SandboxError("the machine is gone")


async def exits(submission: Submission) -> Verdict:
    sys.exit(0)


ENDINGS: dict[str, tuple[dict, Reason, float | None]] = {
    "out of turns": ({"answers": ("$ echo hi",), "max_turns": 2}, Reason.TURN_LIMIT, 1.0),
    "out of context": ({"answers": ("$ echo " + "x" * 150,), "max_context": 1200}, Reason.CONTEXT_FULL, 1.0),
    "out of time": ({"faults": (Fault.STALL,), "agent_timeout_s": 0.02}, Reason.NOTHING_SAMPLED, None),
    "dead sandbox": ({"respond": dying}, Reason.SANDBOX_CRASH, None),
    "dead engine": ({"faults": (Fault.FAIL,)}, Reason.ENGINE_FAILURE, None),
    "lying engine": ({"faults": (Fault.LIE,)}, Reason.ENGINE_FAILURE, None),
    "broken harness": ({"harness": Raises(KeyError("bug"))}, Reason.HARNESS_CRASH, None),
    "a harness's own timeout": ({"harness": Raises(TimeoutError("a socket's"))}, Reason.HARNESS_CRASH, None),
    "a harness's own cancelled task": ({"harness": Cancels()}, Reason.HARNESS_CRASH, None),
    "a harness without a return": ({"harness": Returns(None)}, Reason.HARNESS_CRASH, None),
    "a harness that returns a word": ({"harness": Returns("done")}, Reason.HARNESS_CRASH, None),
    "a harness that exits": ({"harness": Raises(SystemExit(0))}, Reason.HARNESS_CRASH, None),
    "a harness that interrupts": ({"harness": Raises(KeyboardInterrupt())}, Reason.HARNESS_CRASH, None),
    "a harness with an error of no kind": ({"harness": Raises(BaseException("odd"))}, Reason.HARNESS_CRASH, None),
    "a harness whose thread exits": ({"harness": InThread(SystemExit(0))}, Reason.HARNESS_CRASH, None),
    "a grader that exits": ({"grader": exits}, Reason.VERIFIER_CRASH, None),
    "half a character in a traceback": ({"harness": Raises(KeyError("\ud800"))}, Reason.HARNESS_CRASH, None),
    "out of turns in a task group": (
        {"harness": InGroup(HarnessConfig()), "answers": ("$ echo hi",), "max_turns": 2},
        Reason.TURN_LIMIT,
        1.0,
    ),
    "dead sandbox in a task group": (
        {"harness": InGroup(HarnessConfig()), "respond": dying},
        Reason.SANDBOX_CRASH,
        None,
    ),
    "nothing said": ({"harness": Silent()}, Reason.NOTHING_SAMPLED, None),
    "task longer than the context": ({"max_context": 20}, Reason.NOTHING_SAMPLED, None),
    "no verdict": ({"verdict": None}, Reason.VERIFIER_CRASH, None),
    "an empty verdict": ({"verdict": b""}, Reason.VERIFIER_CRASH, None),
    "a verdict that is no number": ({"verdict": b"abc"}, Reason.VERIFIER_CRASH, None),
    "a slow verifier": ({"verifier_times_out": True}, Reason.VERIFIER_TIMEOUT, None),
}


@pytest.mark.parametrize("ending", ENDINGS)
async def test_an_episode_ends_with_the_reason_of_its_end(ending: str, task: HarborTask):
    settings, reason, reward = ENDINGS[ending]
    episode = await World(task, **settings).run()
    assert (episode.reason, episode.reward) == (reason, reward)
    assert episode.reason.trustworthy == (reward is not None)
    assert (episode.verdict.reward is None) == (reward is None)
    ours = {Reason.SANDBOX_CRASH, Reason.ENGINE_FAILURE, Reason.HARNESS_CRASH}
    assert bool(episode.error) == (reason in ours or "grader" in settings), "a failure of ours keeps its traceback"


def test_the_ways_to_be_cut_off_are_told_apart():
    trusted = {Reason.AGENT_TIMEOUT: True, Reason.CONTEXT_FULL: True, Reason.SANDBOX_CRASH: False}
    trusted |= {Reason.VERIFIER_TIMEOUT: False, Reason.VERIFIER_CRASH: False, Reason.CANCELLED: False}
    assert len({reason.value for reason in trusted}) == 6
    assert {reason: reason.trustworthy for reason in trusted} == trusted


async def test_an_agent_out_of_time_keeps_the_reward_of_what_it_left_behind(task: HarborTask):
    class Slow(BashHarness):
        async def run(self, task, session, sandbox) -> Reason:
            await super().run(task, session, sandbox)
            await asyncio.sleep(3600)
            return Reason.DONE

    episode = await World(task, harness=Slow(HarnessConfig()), agent_timeout_s=0.2).run()
    assert (episode.reason, episode.reward, len(episode.turns)) == (Reason.AGENT_TIMEOUT, 1.0, 2)


async def test_an_agents_time_does_not_run_while_sampling_is_paused(task: HarborTask) -> None:
    class Held(BashHarness):
        async def run(self, *its: Any) -> Reason:
            await asyncio.sleep(0.2)
            return await super().run(*its)

    world = World(task, harness=Held(HarnessConfig()), agent_timeout_s=0.05)
    world.pause.pause()
    episode = await world.run()
    assert (episode.reason, len(episode.turns)) == (Reason.DONE, 2)


async def test_a_turn_that_the_time_limit_cuts_off_leaves_the_turns_before_it(task: HarborTask):
    world = World(task, agent_timeout_s=0.2)
    await world.engine.update(3)
    answer = world.engine._respond

    def stall_after_the_first(request: GenerateRequest) -> list[int]:
        world.engine.inject(Fault.STALL)
        return answer(request)

    world.engine._respond = stall_after_the_first
    episode = await world.run()
    assert (episode.reason, episode.reward, len(episode.turns)) == (Reason.AGENT_TIMEOUT, 1.0, 1)


async def test_nothing_sampled_has_the_time_that_was_measured(task: HarborTask):
    class Waits:
        async def run(self, task, session, sandbox) -> Reason:
            await asyncio.sleep(0.03)
            return Reason.DONE

    episode = await World(task, harness=Waits()).run()
    assert (episode.reason, episode.num_sampled) == (Reason.NOTHING_SAMPLED, 0)
    assert episode.elapsed_s >= 0.03


async def test_stalled_turns_in_a_row_end_the_episode(task: HarborTask):
    episode = await World(task, answers=("$",)).run()
    assert (episode.reason, len(episode.turns), episode.reward) == (Reason.STALLED, 3, 1.0)


async def test_a_call_between_stalled_turns_starts_the_count_anew(task: HarborTask):
    episode = await World(task, answers=("$", "$", "$ echo hi", "$", "$", "done")).run()
    assert (episode.reason, len(episode.turns)) == (Reason.DONE, 6)


@pytest.mark.parametrize("error", [WorkerDied("gone"), WorkerError("bug"), LedgerError("twice")], ids=lambda e: type(e))
async def test_what_breaks_the_run_goes_on_outwards(error: Exception, task: HarborTask):
    with pytest.raises(type(error)):
        await World(task, harness=Raises(error)).run()


async def test_a_ledger_that_contradicts_is_no_fault_of_the_harness(task: HarborTask):
    world = World(task, journal=Journal(error=LedgerError("a second end")))
    with pytest.raises(LedgerError):
        await world.run()
    assert not world.backend.sandboxes


async def test_a_failure_that_an_agent_keeps_to_itself_still_ends_the_episode(task: HarborTask):
    class Swallows:
        async def run(self, task, session, sandbox) -> Reason:
            await session.chat([Message(role="user", content="u")])
            with pytest.raises(Exception, match="told to fail"):
                await session.chat([Message(role="user", content="u")])
            return Reason.DONE

    world = World(task, harness=Swallows())
    answer = world.engine._respond

    def fail_after_the_first(request: GenerateRequest) -> list[int]:
        world.engine.inject(Fault.FAIL)
        return answer(request)

    world.engine._respond = fail_after_the_first
    episode = await world.run()
    assert (episode.reason, episode.reward) == (Reason.ENGINE_FAILURE, None)


async def test_a_sandbox_that_cannot_start_is_an_episode_with_its_reason(task: HarborTask):
    class Full(ScriptedBackend):
        async def create(self, spec):
            raise SandboxError("no space left")

    world = World(task)
    world.backend = Full()
    episode = await world.run()
    assert (episode.reason, episode.reward, episode.turns) == (Reason.SANDBOX_CRASH, None, ())
    assert "no space left" in episode.error


async def test_a_sandbox_that_does_not_close_costs_no_verdict(task: HarborTask, monkeypatch: pytest.MonkeyPatch):
    world = World(task)
    close = ScriptedSandbox.close

    async def stuck(sandbox: ScriptedSandbox) -> None:
        await close(sandbox)
        if not sandbox.name.endswith("-grade-0"):
            raise SandboxError("still busy")

    monkeypatch.setattr(ScriptedSandbox, "close", stuck)
    episode = await world.run()
    assert (episode.reason, episode.reward) == (Reason.DONE, 1.0) and "still busy" in episode.error


async def test_a_cancelled_episode_closes_its_sandbox_and_goes_on_outwards(task: HarborTask):
    world = World(task, faults=(Fault.STALL,))
    run = asyncio.create_task(world.run())
    await asyncio.sleep(0.02)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not world.backend.sandboxes and not world.engine._running


async def test_an_order_repeats_token_for_token_in_another_incarnation(task: HarborTask):
    first = await World(task).run()
    again = World(task)
    again.order = msgspec.structs.replace(again.order, incarnation=1)
    second = await again.run()
    for one, other in zip(first.turns, second.turns, strict=True):
        assert one.context == other.context and one.sampled == other.sampled


async def test_a_sandbox_that_would_die_before_its_verdict_is_refused_before_anything_runs(task: HarborTask):
    verifier_s = task.task.verifier_timeout_s
    with pytest.raises(ValueError, match="must live longer"):
        await World(task, agent_timeout_s=100.0, ttl_s=100.0).run()
    lived = await World(task, agent_timeout_s=100.0, ttl_s=100.0 + verifier_s + 30.0).run()
    assert lived.reward == 1.0


async def test_the_agents_sandbox_gets_the_time_to_live_of_the_run(task: HarborTask):
    def outlive(sandbox: ScriptedSandbox, command: Command) -> ExecResult:
        return ExecResult(exit_code=0, output=b"", elapsed_s=sandbox.spec.ttl_s or 0.0)

    episode = await World(task, ttl_s=1000.0, respond=outlive).run()
    assert episode.reason is Reason.SANDBOX_CRASH and episode.reward is None


class Deaf:
    """Works on, whatever is asked of it; later calls fail at once, without a moment in which others could run."""

    async def run(self, task, session, sandbox):
        await session.chat([Message(role="user", content="hi")])
        while True:
            try:
                await sandbox.exec(Command(argv=("echo", "on"), timeout_s=1))
                await asyncio.sleep(3600)
            except BaseException:
                continue


async def test_a_harness_that_swallows_its_time_limit_ends_with_it_and_is_graded(task, monkeypatch):
    monkeypatch.setattr("everlong.rollouts.runner.GRACE_S", 0.05)
    episode = await World(task, harness=Deaf(), agent_timeout_s=0.2).run()
    assert (episode.reason, episode.reward, len(episode.turns)) == (Reason.AGENT_TIMEOUT, 1.0, 1)
