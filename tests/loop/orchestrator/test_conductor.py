"""The conductor over real parts in one process: what it writes down when graders fail, batches are late and processes die."""

import asyncio
import time
from collections import Counter

import pytest
from tests.loop.orchestrator.worlds import Grader, Killed, World

from everlong.contracts.records import Purpose
from everlong.environments.tasks.config import TasksConfig
from everlong.environments.tasks.sources import read_run_tasks
from everlong.environments.tasks.terminal.generate import make_terminal
from everlong.ledger import (
    BatchTrained,
    EpisodeFinished,
    EpisodeStarted,
    RunResumed,
    WeightsAdopted,
)
from everlong.observe import MemorySink
from everlong.orchestrator.events import RunAborted
from everlong.orchestrator.loop import run


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    make_terminal(folder / "train", 6, kinds=("write-word",))
    return read_run_tasks(TasksConfig(train=(folder / "train",)))


@pytest.fixture
def world(tmp_path, tasks):
    return lambda name="run", **schedule: World(tmp_path / name, tasks, **schedule)


@pytest.mark.parametrize("how", ["silent", "broken"])
async def test_a_grader_that_fails_every_third_time_costs_these_episodes_and_not_the_run(world, how):
    one = world(num_batches=6, max_failures=12)
    grader = Grader(lambda count: how if count % 3 == 0 else "")
    await one.drive(grader=grader)
    balance = one.balance()
    assert grader.failures == 24
    assert balance.ended["failed"] == {"verifier_crash": 24}
    assert sum(sum(balance.ended.get(state, {}).values()) for state in ("trained", "discarded")) == 48
    assert balance.tokens_discarded["no_verdict"] > 0 and balance.tokens_trained > 0
    rows = [point.values for point in one.metrics.points if point.axis == "batch"]
    lost = [rows[-1][f"lost_by_length/{place:02d}"] for place in range(1, 11)]
    assert sum(lost) / len(lost) == pytest.approx(1 / 3, abs=0.05), "a third of the episodes, over all lengths"
    without = [point.values["without_verdict"] for point in one.metrics.points if point.axis == "batch"]
    assert sum(without) == 24, "the metrics count what the ledger counts"


async def test_graders_that_all_fail_stop_the_run_with_what_they_said(world):
    broken, silent = world("broken", max_failures=5), world("silent", max_failures=5)
    with pytest.raises(RunAborted, match=r"5 episodes in a row(.|\n)*RuntimeError: the grader exploded"):
        await broken.drive(grader=Grader(lambda count: "broken"))
    with pytest.raises(RunAborted, match=r"5 episodes in a row(.|\n)*the grader printed this"):
        await silent.drive(grader=Grader(lambda count: "silent"))
    assert not broken.facts(BatchTrained) and not silent.facts(BatchTrained)


async def test_an_aborted_run_goes_on_once_the_grader_is_mended_and_ends_as_if_nothing_had_been(world):
    # Episodes of the aborted run that ended without a verdict keep their end: their groups train on the others.
    one = world(max_failures=3)
    with pytest.raises(RunAborted):
        await one.drive(grader=Grader(lambda count: "broken"))
    await one.drive()
    assert one.balance().ended["failed"]["verifier_crash"] >= 3
    assert one.groups() == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]


@pytest.mark.parametrize("on_deadline", ["mask", "replace"])
async def test_an_episode_that_a_crash_interrupted_has_an_end_even_if_the_deadline_comes_before_its_turn(
    world, on_deadline
):
    one = world(batch_deadline_s=0.5, on_deadline=on_deadline, num_batches=1, max_running=12)
    everyone = [f"train-{group:06d}-{attempt:03d}" for group in range(3) for attempt in range(4)]
    with pytest.raises(TimeoutError):
        async with one.process(stalled=everyone) as (scheduler, conductor, _, _trainer):
            await asyncio.wait_for(run(scheduler, conductor, time.monotonic), 0.3)
    one.schedule = one.schedule.model_copy(update={"max_running": 1})
    await one.drive(stalled=everyone)
    assert not one.balance().open


@pytest.mark.parametrize(("dies_in", "every"), [("train", 1), ("save", 1), ("train", 3), ("save", 2)])
async def test_a_batch_that_was_closed_before_a_crash_trains_the_same_groups_to_the_same_weights(world, dies_in, every):
    whole, killed = world("whole", checkpoint_every=every), world("killed", checkpoint_every=every)
    expected = await whole.drive()
    with pytest.raises(Killed):
        await killed.drive(dies_in=dies_in, batch=1)
    assert len(killed.groups()) == 2, "closed"
    assert len(killed.facts(BatchTrained)) == 1, "and not trained, as the ledger knows"
    finished = {fact.episode for fact in killed.facts(EpisodeFinished)}
    starts = Counter(fact.episode for fact in killed.facts(EpisodeStarted))
    assert await killed.drive() == expected
    assert killed.groups() == whole.groups()
    again = Counter(fact.episode for fact in killed.facts(EpisodeStarted)) - starts
    assert not finished & again.keys()
    assert killed.balance() == whole.balance(), "not a token more, not a token less"
    retrained = [fact.num_batches for fact in killed.facts(RunResumed)]
    assert retrained == ([0] if (dies_in, every) == ("train", 3) else [None])


async def test_a_checkpoint_that_is_older_than_the_ledger_trains_the_batches_between_again(world):
    whole, killed = (
        world("whole", checkpoint_every=9, num_batches=4),
        world("killed", checkpoint_every=9, num_batches=4),
    )
    expected = await whole.drive()
    with pytest.raises(Killed):
        await killed.drive(dies_in="train", batch=3)
    assert await killed.drive() == expected
    assert [fact.batch for fact in killed.facts(BatchTrained)] == [0, 1, 2, 0, 1, 2, 3]
    assert max(Counter(fact.episode for fact in killed.facts(EpisodeStarted)).values()) == 1, "from stored episodes"
    assert killed.balance() == whole.balance()


async def test_batches_that_come_out_otherwise_on_another_machine_go_on_with_what_was_published(world):
    one = world(checkpoint_every=9, num_batches=4)
    with pytest.raises(Killed):
        await one.drive(dies_in="train", batch=3)
    one.metrics = MemorySink()
    await one.drive(rounds_otherwise=True)
    assert [fact.version for fact in one.facts(WeightsAdopted)] == [1, 2, 3]
    assert [line.split(" came out")[0] for line in one.said] == [f"policy version {n}" for n in (1, 2, 3)]
    rows = {point.step: point.values for point in one.metrics.points if point.axis == "batch"}
    assert [rows[batch]["weights_adopted"] for batch in range(3)] == [1.0] * 3 and "weights_adopted" not in rows[3]
    assert one.balance().holds and one.lifecycle().finished


async def test_what_was_trained_again_and_refused_leaves_no_row_and_no_fact(world):
    one = world(checkpoint_every=9, num_batches=4)
    with pytest.raises(Killed):
        await one.drive(dies_in="train", batch=3)
    for version in (1, 2):  # published once behind three batches
        (one.folder / f"store/weights/versions/{version:08d}").unlink()
    one.metrics = MemorySink()
    with pytest.raises(ValueError, match="other bits than published"):
        await one.drive(rounds_otherwise=True, refuses=True)
    assert [fact.batch for fact in one.facts(BatchTrained)] == [0, 1, 2]
    assert one.metrics.points == [] and one.facts(WeightsAdopted) == []


@pytest.mark.parametrize("dies_in", ["save", "train"])
async def test_every_batch_has_its_row_of_metrics_whenever_the_process_died(world, dies_in):
    one = world(checkpoint_every=3, num_batches=3)
    with pytest.raises(Killed):
        await one.drive(dies_in=dies_in, batch=2)
    one.metrics = MemorySink()  # as if what was written since the checkpoint had been lost
    await one.drive()
    rows = {point.step: point.values for point in one.metrics.points if point.axis == "batch"}
    again = {"save": {2}, "train": {0, 1, 2}}[dies_in]
    assert rows.keys() == again
    whole = world("whole", checkpoint_every=3, num_batches=3)
    await whole.drive()
    known = {point.step: point.values for point in whole.metrics.points if point.axis == "batch"}
    for batch in again:
        for name in ("reward", "episodes", "sampled_tokens", "groups_without_signal"):
            assert rows[batch][name] == known[batch][name]


async def test_a_row_is_written_before_the_ledger_says_that_its_batch_is_trained(world):
    for axis, rows in (("batch", 3), ("policy_version", 4)):
        one = world(axis)

        def refuse(logged, step, values, axis=axis):
            if logged == axis:
                raise Killed

        one.metrics.log = refuse
        with pytest.raises(Killed):
            await one.drive()
        one.metrics = MemorySink()
        await one.drive()
        assert [point.step for point in one.metrics.points if point.axis == axis] == list(range(rows))


async def test_catching_up_saves_the_checkpoints_that_are_due(world):
    one = world(checkpoint_every=9, num_batches=4)
    with pytest.raises(Killed):
        await one.drive(dies_in="train", batch=3)
    one.schedule = one.schedule.model_copy(update={"checkpoint_every": 1})
    with pytest.raises(Killed):
        await one.drive(dies_in="train", batch=2)
    async with one.process() as (_scheduler, _conductor, writer, trainer):
        assert (await trainer.save()).num_batches == writer.lifecycle.num_trained == 3
    assert [fact.batch for fact in one.facts(BatchTrained)] == [0, 1, 2, 0, 1, 2], "the third process had 0 and 1"


async def test_the_row_of_a_batch_says_what_the_engine_and_the_sessions_counted(world):
    one = world(late_after=11, batch_deadline_s=0.1, num_batches=1)
    await one.drive(stalled=["train-000000-001"])
    (row,) = (point.values for point in one.metrics.points if point.axis == "batch")
    assert row["engine/replies"] > 0 and row["engine/running"] == row["engine/waiting"] == 0
    assert (row["deadlines"], row["forks"], row["reason/deadline"]) == (1, 0, 1)


async def test_a_process_that_stops_while_it_catches_up_is_caught_up_with_as_well(world):
    whole, killed = (
        world("whole", checkpoint_every=9, num_batches=4),
        world("killed", checkpoint_every=9, num_batches=4),
    )
    expected = await whole.drive()
    for dies_at in (3, 2, 1):
        with pytest.raises(Killed):
            await killed.drive(dies_in="train", batch=dies_at)
    assert await killed.drive() == expected
    assert killed.groups() == whole.groups() and killed.balance() == whole.balance()


async def test_a_run_that_is_resumed_after_its_end_does_nothing_and_stays_whole(world):
    one = world()
    expected = await one.drive()
    batches = one.groups()
    assert await one.drive() == expected
    assert one.groups() == batches and one.balance().holds
    assert len(one.facts(BatchTrained)) == 3
    assert {view.purpose for view in one.lifecycle().episodes.values()} == {Purpose.TRAIN}
