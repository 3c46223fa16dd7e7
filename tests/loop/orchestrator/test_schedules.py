"""Partial rollout and overlap carried out over real parts: one end per episode and bounded age, wherever the process dies."""

import asyncio
from collections import Counter

import pytest
from tests.loop.orchestrator.worlds import Killed, World

from everlong.environments.tasks.config import TasksConfig
from everlong.environments.tasks.sources import read_run_tasks
from everlong.environments.tasks.terminal.generate import make_terminal
from everlong.ledger import BatchClosed, BatchTrained, EpisodeFinished, RunFinished
from everlong.orchestrator.config import AsyncConfig, PartialConfig
from everlong.orchestrator.loop import run

NUM_BATCHES = 5
SCHEDULES = {
    "partial": (PartialConfig, {"completion": 0.4}),
    "partial-masked": (PartialConfig, {"completion": 0.4, "max_staleness": 1}),
    "async": (AsyncConfig, {"max_staleness": 2}),
    "async-rarely-published": (AsyncConfig, {"max_staleness": 3, "publish_every": 3}),
    "async-masked": (AsyncConfig, {"max_staleness": 1, "on_over_age": "mask"}),
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    make_terminal(folder / "train", 6, kinds=("write-word",))
    return read_run_tasks(TasksConfig(train=(folder / "train",)))


@pytest.fixture(params=SCHEDULES)
def one(request, tmp_path, tasks):
    kind, settings = SCHEDULES[request.param]
    return World(tmp_path / "run", tasks, kind=kind, num_batches=NUM_BATCHES, checkpoint_every=2, **settings)


class Dying:
    """A conductor that dies before its `num_events`-th event; what was under way writes nothing more."""

    def __init__(self, conductor, num_events):
        self._conductor, self._left = conductor, num_events
        self.begin, self.close = conductor.begin, conductor.close

    async def next_event(self, wake_at_s):
        self._left -= 1
        if self._left < 0:
            raise Killed
        return await self._conductor.next_event(wake_at_s)


async def drive(world, num_events, **process):
    """One process of the run; whether it came to the end."""
    async with world.process(**process) as (scheduler, conductor, writer, _):
        try:
            await asyncio.wait_for(run(scheduler, Dying(conductor, num_events), world.clock), 100)
        except Killed:
            return False
        await writer.append(RunFinished())
        return True


def check(world):
    """What must hold at the end of every run."""
    balance = world.balance()
    assert not balance.open and balance.tokens_trained > 0
    groups = [group for batch in world.groups() for group in batch]
    assert len(world.groups()) == NUM_BATCHES and all(world.groups())
    assert sorted(groups) == list(range(len(groups))), "every group that was offered trained once"
    assert [fact.batch for fact in world.facts(BatchClosed)] == list(range(NUM_BATCHES))
    finished = Counter(fact.episode for fact in world.facts(EpisodeFinished))
    assert max(finished.values()) == 1 and len(finished) == 4 * len(groups)
    rows = {point.step: point.values for point in world.metrics.points if point.axis == "batch"}
    assert sorted(rows) == list(range(NUM_BATCHES))
    bound = world.schedule.max_staleness
    ages = {
        int(name.rsplit("/", 1)[1])
        for row in rows.values()
        for name, n in row.items()
        if "staleness/share/" in name and n
    }
    assert bound is None or max(ages) <= bound
    over_age = balance.tokens_discarded.get("over_age", 0)
    assert over_age == sum(row.get("tokens/discarded/over_age", 0) for row in rows.values())
    if getattr(world.schedule, "on_over_age", "mask") == "wait":
        assert over_age == 0
    return rows


async def test_every_group_that_is_opened_trains_once_and_no_token_beyond_the_bound(one):
    assert await drive(one, 10_000)
    rows = check(one)
    assert all(row["samples_per_hour"] > 0 and 0 <= row["idle/trainer"] <= 1 for row in rows.values())


@pytest.mark.parametrize("kills", [(14, 2, 25), (45, 7)], ids=str)
async def test_killed_at_any_event_it_goes_on_and_every_episode_has_one_end(one, kills):
    for num_events in kills:
        await drive(one, num_events)
        assert one.balance().holds
    assert await drive(one, 10_000)
    check(one)


@pytest.mark.parametrize(("dies_in", "batch"), [("save", 1), ("train", 2)])
async def test_a_trainer_that_dies_trains_the_same_batches_again(one, dies_in, batch):
    with pytest.raises(Killed):
        await one.drive(dies_in=dies_in, batch=batch)
    closed = one.groups()
    assert len(closed) == batch + 1
    await one.drive()
    assert one.groups()[: batch + 1] == closed
    check(one)
    assert len(one.facts(BatchTrained)) <= NUM_BATCHES + 2, "a checkpoint is two batches behind at most"


async def test_a_stuck_episode_is_masked_at_the_deadline_of_its_group(tmp_path, tasks):
    one = World(
        tmp_path / "run", tasks, late_after=11, kind=AsyncConfig, num_batches=1, max_staleness=0, group_deadline_s=10.0
    )
    await one.drive(stalled=["train-000001-002"])
    assert one.balance().ended["cancelled"] == {"deadline": 1}
    (row,) = (point.values for point in one.metrics.points if point.axis == "batch")
    assert (row["deadlines"], row["reason/deadline"]) == (1, 1)
