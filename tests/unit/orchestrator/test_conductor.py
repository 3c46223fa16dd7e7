"""Rounds carried out against a real ledger and store: what every episode ends as, whoever fails."""

import asyncio

import msgspec
import pytest

from everlong.contracts.errors import Reason
from everlong.contracts.records import Episode, EpisodeOrder, FinishReason, Purpose, Turn, Verdict
from everlong.contracts.tokens import TokenColumns
from everlong.engines.scripted import ScriptedEngine
from everlong.ledger import EpisodeStore, Ledger, LedgerWriter, RunStarted, TurnSampled, check_ledger, read_lifecycle
from everlong.observe import MemorySink
from everlong.orchestrator.batches import BatchMaker
from everlong.orchestrator.conductor import Parts, RunConductor
from everlong.orchestrator.config import RoundsConfig, WarmupConfig
from everlong.orchestrator.events import EpisodeEnded
from everlong.orchestrator.loop import run
from everlong.orchestrator.recovery import progress_of
from everlong.orchestrator.schedules import make_scheduler
from everlong.storage import open_store
from everlong.trainer.scripted import ScriptedTrainer
from everlong.trajectories.admission import AdmissionConfig
from everlong.trajectories.credit import GroupMeanConfig
from everlong.trajectories.packing import PackingConfig
from everlong.weights import WeightPublisher, WeightReader

NUM_TOKENS = 3


class World:
    """A run of two batches, two groups of four; `outcome` says how each order ends, and may wait before it does.

    Attempt `crashes` of every group ends before its first token. The clock stands at 0, and at 100 from the moment at
    which `late_after` episodes have ended.
    """

    def __init__(self, tmp_path, outcome, late_after=1000, crashes=-1, **schedule) -> None:
        self.crashes, self.late_after, self.num_ended, self.flags = crashes, late_after, 0, {}
        self.is_late = asyncio.Event()
        self.outcome, self.path, self.metrics = outcome, tmp_path / "ledger.db", MemorySink()
        self.ledger = Ledger.open(self.path)
        self.writer = LedgerWriter(self.ledger)
        store = open_store("memory://")
        self.episodes = EpisodeStore(store)
        engine = ScriptedEngine(lambda request: [1], WeightReader(store), token_bytes=[b"a", b"b"])
        self.scheduler = make_scheduler(
            RoundsConfig(**{"num_batches": 2, "groups_per_batch": 2, "group_size": 4, **schedule}),
            WarmupConfig(),
            train_tasks=["a", "b"],
            eval_tasks=[],
            seed=0,
        )
        self.conductor = RunConductor(
            Parts(
                run_episode=self.run_episode,
                engine=engine,
                trainer=ScriptedTrainer(store, WeightPublisher(store, 1)),
                ledger=self.writer,
                episodes=self.episodes,
                batches=BatchMaker(GroupMeanConfig(), AdmissionConfig(), PackingConfig(), 0),
                warmup_batch=None,  # type: ignore[arg-type]  # there is no warm-up
                metrics=self.metrics,
                task_hashes={"a": "1", "b": "2"},
                clock=self.clock,
            )
        )

    def clock(self) -> float:
        return 100.0 if self.num_ended >= self.late_after else 0.0

    async def run_episode(self, order: EpisodeOrder) -> Episode:
        if order.attempt == self.crashes:
            reason = Reason.SANDBOX_CRASH
            return Episode(order=order, reason=reason, verdict=Verdict(reward=None, reason=reason), error="boom")
        turn = Turn(
            index=0,
            parent=-1,
            context=TokenColumns.context([1, 2]),
            sampled=TokenColumns.sampled_tokens(
                [0] * NUM_TOKENS, [-0.5] * NUM_TOKENS, version=order.min_policy_version
            ),
            finish_reason=FinishReason.STOP,
        )
        fact = TurnSampled(episode=order.episode, incarnation=order.incarnation, turn=0, num_tokens=NUM_TOKENS)
        await self.writer.append(fact)
        reason, reward = await self.outcome(order)
        verdict = Verdict(reward=reward, reason=None if reason.trustworthy else reason)
        verdict = msgspec.structs.replace(verdict, flags=self.flags.get(order.episode, ()))
        return Episode(order=order, reason=reason, verdict=verdict, turns=(turn,), error="Traceback: boom")

    async def run(self) -> None:
        try:
            await run(self.scheduler, self, self.clock)
        finally:
            await self.writer.close()
            self.ledger.close()

    # a conductor that adds the books up after every event

    def begin(self, action) -> None:
        self.conductor.begin(action)

    async def next_event(self, wake_at_s):
        event = await self.conductor.next_event(wake_at_s)
        self.num_ended += isinstance(event, EpisodeEnded)
        if self.num_ended >= self.late_after:
            self.is_late.set()
        assert self.writer.lifecycle.balance().holds
        return event

    async def close(self) -> None:
        await self.conductor.close()

    def report(self):
        report = check_ledger(self.path)
        assert report.ok, report.problems
        return report.balance


@pytest.fixture
def opened(tmp_path):
    def make(outcome, **schedule) -> World:
        world = World(tmp_path, outcome, **schedule)
        world.ledger.append(RunStarted(seed=0, config_hash="", tasks_hash=""))
        return world

    return make


def rewarded(order: EpisodeOrder) -> float:
    return float(order.attempt % 2)


async def test_an_exception_that_is_no_episodes_own_stops_the_run_as_it_was_raised(opened):
    async def outcome(order):
        raise RuntimeError("a bug of ours")

    with pytest.raises(RuntimeError, match="a bug of ours"):
        await opened(outcome).run()


async def test_a_member_that_is_late_is_masked_and_its_batch_is_trained(opened):
    async def outcome(order):
        if (order.group, order.attempt) == (1, 2):
            await asyncio.sleep(3600)
        return Reason.DONE, rewarded(order)

    world = opened(outcome, num_batches=1, batch_deadline_s=10, late_after=7)
    await world.run()
    balance = world.report()
    assert balance.ended == {"cancelled": {"deadline": 1}, "trained": {"done": 7}}
    assert balance.tokens_trained == 7 * NUM_TOKENS and sum(balance.tokens_discarded.values()) == NUM_TOKENS
    assert world.scheduler.deadlines == 1


async def test_members_and_groups_that_got_no_slot_before_the_deadline_are_said_apart(opened):
    async def outcome(order):
        if (order.group, order.attempt) == (0, 1):
            await asyncio.sleep(3600)
        return Reason.DONE, rewarded(order)

    world = opened(outcome, max_running=1, batch_deadline_s=10, late_after=1)
    await world.run()
    assert world.report().ended == {
        "cancelled": {"deadline": 1, "never_began": 2},
        "discarded": {"too_few_verdicts": 1},
        "trained": {"done": 8},
    }
    assert [batch.groups for batch in world.writer.lifecycle.batches.values()] == [(0,), (1, 2)]
    rows = [point.values for point in world.metrics.points if point.axis == "batch"]
    assert [(row.get("reason/never_began", 0), row["groups_postponed"]) for row in rows] == [(2, 1), (0, 0)]


async def deaf():
    while True:
        try:  # noqa: SIM105
            await asyncio.sleep(3600)
        except BaseException:
            pass


async def test_a_member_that_ignores_its_cancellation_is_late_like_any_other(opened, monkeypatch):
    monkeypatch.setattr("everlong.orchestrator.conductor.STOP_S", 0.05)

    async def outcome(order):
        if (order.group, order.attempt) == (1, 2):
            await deaf()
        return Reason.DONE, rewarded(order)

    world = opened(outcome, num_batches=1, batch_deadline_s=10, late_after=7)
    await world.run()
    assert world.report().ended == {"cancelled": {"deadline": 1}, "trained": {"done": 7}}


async def test_closing_does_not_wait_for_who_ignores_it(opened, monkeypatch):
    monkeypatch.setattr("everlong.orchestrator.conductor.STOP_S", 0.05)
    started = asyncio.Event()

    async def outcome(order):
        started.set()
        await deaf()

    running = asyncio.create_task(opened(outcome, num_batches=1, batch_deadline_s=None).run())
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_finished_group_can_be_used_while_another_still_runs(opened, tmp_path):
    used = []

    async def outcome(order):
        if (order.group, order.attempt) == (1, 2):
            await world.is_late.wait()
            lifecycle = read_lifecycle(world.path)
            assert lifecycle.is_finished(Purpose.TRAIN, 0) and not lifecycle.is_finished(Purpose.TRAIN, 1)
            views = [lifecycle.episodes[name] for name in lifecycle.groups[Purpose.TRAIN, 0].episodes]
            used.extend(world.episodes.get(view.payload_key, view.payload_hash) for view in views)
            served = progress_of(lifecycle).ended
            assert {view.episode for view in views} <= served, "a resumed run does not sample them again"
        return Reason.DONE, rewarded(order)

    world = opened(outcome, num_batches=1, late_after=7)
    await world.run()
    assert [episode.reward for episode in used] == [0.0, 1.0, 0.0, 1.0]


async def test_a_group_that_is_late_is_replaced_and_nothing_of_it_is_trained(opened):
    async def outcome(order):
        if (order.group, order.attempt) == (1, 2):
            await asyncio.sleep(3600)
        return Reason.DONE, rewarded(order)

    world = opened(outcome, num_batches=1, batch_deadline_s=10, late_after=7, on_deadline="replace")
    await world.run()
    balance = world.report()
    assert balance.ended == {"cancelled": {"group_replaced": 4}, "trained": {"done": 8}}
    assert balance.tokens_discarded == {"group_replaced": 4 * NUM_TOKENS}
    assert world.writer.lifecycle.batches[0].groups == (0, 2)


async def test_a_member_that_failed_before_its_first_token_leaves_a_group_of_three(opened):
    async def outcome(order):
        return Reason.DONE, {0: 1.0, 2: 0.0, 3: 1.0}[order.attempt]

    world = opened(outcome, num_batches=1, groups_per_batch=1, crashes=1)
    await world.run()
    (row,) = (point.values for point in world.metrics.points if point.axis == "batch")
    assert (row["group_size"], row["without_verdict"]) == (3, 1)
    assert row["reward"] == pytest.approx(0.666667, abs=1e-6), "the baseline of its one group"
    balance = world.report()
    assert balance.ended == {"failed": {"sandbox_crash": 1}, "trained": {"done": 3}}
    assert (balance.tokens_sampled, balance.tokens_trained) == (3 * NUM_TOKENS, 3 * NUM_TOKENS)


async def test_what_grading_flagged_is_in_the_ledger_and_in_the_row_of_the_batch(opened):
    async def outcome(order):
        return Reason.DONE, rewarded(order)

    world = opened(outcome, num_batches=1)
    world.flags = {"train-000000-001": ("verdict_preexisting",), "train-000001-003": ("verdict_preexisting", "other")}
    await world.run()
    assert world.report().flags == {"other": 1, "verdict_preexisting": 2}
    (row,) = (point.values for point in world.metrics.points if point.axis == "batch")
    assert (row["flag/verdict_preexisting"], row["flag/other"]) == (2, 1)


async def test_a_group_without_signal_is_discarded_by_name(opened):
    async def outcome(order):
        return Reason.DONE, 0.4 if order.group == 0 else rewarded(order)

    world = opened(outcome, num_batches=1)
    await world.run()
    balance = world.report()
    assert balance.ended == {"discarded": {"zero_signal": 4}, "trained": {"done": 4}}
    assert balance.tokens_discarded == {"zero_signal": 4 * NUM_TOKENS}
