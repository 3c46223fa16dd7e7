"""The round scheduler as a pure machine: what it asks for, in which order, under every schedule of endings and crashes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everlong.contracts.errors import Reason
from everlong.contracts.records import Purpose
from everlong.orchestrator.config import RoundsConfig, WarmupConfig
from everlong.orchestrator.cursor import task_of_group, traces_of_batch
from everlong.orchestrator.events import (
    BatchDone,
    CancelEpisode,
    DropGroup,
    EngineUpdated,
    EpisodeEnded,
    EvalRecorded,
    Publish,
    Published,
    RecordEval,
    RunAborted,
    RunEpisode,
    Started,
    Tick,
    TrainGroups,
    UpdateEngine,
    WarmUp,
)
from everlong.orchestrator.progress import Progress
from everlong.orchestrator.schedules import make_scheduler

TASKS = [f"t{i}" for i in range(12)]


def make(progress=None, warmup=0, tasks=TASKS, evals=(), **schedule):
    defaults = {"num_batches": 3, "groups_per_batch": 4, "group_size": 1, "max_running": 64, "batch_deadline_s": None}
    return make_scheduler(
        RoundsConfig(**{**defaults, **schedule}),
        WarmupConfig(num_batches=warmup),
        train_tasks=tasks,
        eval_tasks=list(evals),
        seed=7,
        progress=progress,
    )


def ended(order, now=0.0, reason=Reason.DONE, reward=1.0, error=""):
    return EpisodeEnded(now, order, reason, reward, error)


class World:
    """Answers every action at once, except episodes, which end when told."""

    def __init__(self, scheduler, num_batches=0):
        self.scheduler, self.log, self.orders, self.version = scheduler, [], [], num_batches
        self.feed(Started(0.0))

    def feed(self, event):
        queue = [event]
        while queue:
            for action in self.scheduler.on_event(queue.pop(0)):
                self.log.append(action)
                match action:
                    case RunEpisode():
                        self.orders.append(action.order)
                    case WarmUp() | TrainGroups():
                        self.version = action.batch + 1
                        queue.append(BatchDone(0.0, action.batch, self.version))
                    case Publish():
                        queue.append(Published(0.0, self.version))
                    case UpdateEngine():
                        queue.append(EngineUpdated(0.0, action.policy_version))
                    case RecordEval():
                        queue.append(EvalRecorded(0.0, action.index))

    def end(self, order, **how):
        self.orders.remove(order)
        self.feed(ended(order, **how))

    def drain(self):
        while self.orders:
            self.end(self.orders[0])


def test_a_round_publishes_updates_samples_and_trains_in_this_order():
    world = World(make(num_batches=1))
    world.drain()
    kinds = [type(action).__name__ for action in world.log]
    assert kinds == ["Publish", "UpdateEngine", *["RunEpisode"] * 4, "TrainGroups", "Publish", "UpdateEngine"]
    assert world.scheduler.finished


def test_every_episode_of_a_batch_needs_the_version_that_the_batch_trains_on():
    world = World(make(num_batches=3))
    world.drain()
    episodes = [action.order for action in world.log if isinstance(action, RunEpisode)]
    assert [order.min_policy_version for order in episodes] == [0] * 4 + [1] * 4 + [2] * 4


def test_no_more_episodes_run_than_allowed_and_the_oldest_start_first():
    world = World(make(num_batches=1, group_size=3, max_running=5))
    seen = [world.orders[:]]
    while world.orders:
        assert len(world.orders) <= 5
        world.end(world.orders[0])
        seen.append(world.orders[:])
    started = [action.order for action in world.log if isinstance(action, RunEpisode)]
    assert [(o.group, o.attempt) for o in started] == [(g, a) for g in range(4) for a in range(3)]


def test_staleness_zero_still_keeps_a_whole_batch_in_flight():
    assert len(World(make(groups_per_batch=4, group_size=2)).orders) == 8


def test_warm_up_batches_come_first_and_only_their_last_version_is_published():
    world = World(make(warmup=3, num_batches=1, checkpoint_every=2))
    warm = [action for action in world.log if isinstance(action, WarmUp)]
    assert [(w.batch, w.save) for w in warm] == [(0, False), (1, True), (2, True)]
    assert [type(a).__name__ for a in world.log[:5]] == ["WarmUp", "WarmUp", "WarmUp", "Publish", "UpdateEngine"]


def test_evaluations_stand_before_the_first_batch_at_the_interval_and_after_the_last():
    world = World(make(num_batches=4, eval_every=2, evals=["e0", "e1"]))
    world.drain()
    kinds = [a for a in world.log if isinstance(a, RecordEval | TrainGroups)]
    shape = [("eval", a.index) if isinstance(a, RecordEval) else ("train", a.batch) for a in kinds]
    assert shape == [("eval", 0), ("train", 0), ("train", 1), ("eval", 2), ("train", 2), ("train", 3), ("eval", 4)]
    numbers = [a.order.group for a in world.log if isinstance(a, RunEpisode) and a.order.purpose is Purpose.EVAL]
    assert len(set(numbers)) == len(numbers), "evaluation groups are numbered over the whole run"


def test_resume_serves_exactly_the_tasks_that_no_trained_batch_holds():
    # trained groups 0-3, finished and unused 5, in flight 4, 6, 7
    progress = Progress(
        num_batches=1,
        consumed=frozenset({0, 1, 2, 3}),
        ended=frozenset({"train-000005-000"}),
        incarnations={f"train-{g:06d}-000": 1 for g in (4, 6, 7)},
    )
    world = World(make(progress), progress.num_batches)
    world.drain()
    sampled = [a.order.group for a in world.log if isinstance(a, RunEpisode)]
    assert sampled == [4, 6, 7, 8, 9, 10, 11], "an episode that ended is not sampled again"
    trained = [a.groups for a in world.log if isinstance(a, TrainGroups)]
    assert sorted(g for groups in trained for g in groups) == [4, 5, 6, 7, 8, 9, 10, 11]
    again = {a.order.group: a.order.incarnation for a in world.log if isinstance(a, RunEpisode)}
    assert [again[g] for g in (4, 6, 7, 8)] == [1, 1, 1, 0]


def test_resume_with_the_finished_episode_lost_serves_it_again():
    progress = Progress(num_batches=1, consumed=frozenset({0, 1, 2, 3}))
    world = World(make(progress), progress.num_batches)
    world.drain()
    assert [a.order.group for a in world.log if isinstance(a, RunEpisode)] == list(range(4, 12))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 40), st.randoms(use_true_random=False), st.integers(1, 3), st.integers(1, 6))
def test_wherever_the_run_is_killed_the_batches_are_those_of_the_undisturbed_run(crash_after, random, size, limit):
    def batches(world):
        return {a.batch: a.groups for a in world.log if isinstance(a, TrainGroups)}

    whole = World(make(group_size=size, max_running=limit))
    whole.drain()

    first = World(make(group_size=size, max_running=limit))
    finished = set()
    for _ in range(crash_after):
        if not first.orders:
            break
        order = random.choice(first.orders)
        finished.add(order.episode)
        first.end(order)
    done = batches(first)
    trained = {g for groups in done.values() for g in groups}
    progress = Progress(
        num_batches=len(done),
        consumed=frozenset(trained),
        ended=frozenset(finished),
        incarnations={order.episode: 1 for order in first.orders},
    )
    second = World(make(progress, group_size=size, max_running=limit), progress.num_batches)
    again = [a.order.episode for a in second.log if isinstance(a, RunEpisode)]
    second.drain()
    again = [a.order.episode for a in second.log if isinstance(a, RunEpisode)]
    assert {**done, **batches(second)} == batches(whole)
    assert not finished & set(again), "no finished episode is sampled again"
    assert max(Counter(again).values(), default=1) == 1


def test_a_batch_that_was_closed_before_the_crash_closes_over_the_same_groups():
    progress = Progress(
        num_batches=0, closed_groups=(0, 1, 5, 7), ended=frozenset(f"train-{g:06d}-000" for g in (0, 1, 5, 7))
    )
    world = World(make(progress, num_batches=2))
    trained = [a for a in world.log if isinstance(a, TrainGroups)]
    assert trained[0].groups == (0, 1, 5, 7)
    world.drain()
    assert [a.groups for a in world.log if isinstance(a, TrainGroups)][1] == (2, 3, 4, 6)


def test_a_closed_batch_starts_no_member_that_was_masked_when_it_closed():
    progress = Progress(closed_groups=(0, 1, 2, 3), ended=frozenset({"train-000000-000"}))
    world = World(make(progress, num_batches=1, group_size=2))
    assert not [a for a in world.log if isinstance(a, RunEpisode)]
    assert world.scheduler.finished


def test_at_the_deadline_the_missing_member_is_masked_and_the_step_closes():
    world = World(make(num_batches=1, group_size=4, batch_deadline_s=10.0))
    stuck = world.orders[5]
    for order in [o for o in world.orders if o != stuck]:
        world.end(order)
    assert world.scheduler.wake_at_s == 10.0
    world.feed(Tick(9.9))
    assert not any(isinstance(a, CancelEpisode) for a in world.log)
    world.feed(Tick(10.0))
    assert [a for a in world.log if isinstance(a, CancelEpisode)] == [CancelEpisode(stuck.episode, Reason.DEADLINE)]
    world.end(stuck, now=10.0, reason=Reason.DEADLINE, reward=None)
    assert [a.groups for a in world.log if isinstance(a, TrainGroups)] == [(0, 1, 2, 3)]
    assert world.scheduler.deadlines == 1 and world.scheduler.finished


def test_at_the_deadline_a_late_group_can_be_replaced_by_the_next():
    world = World(make(num_batches=2, group_size=2, batch_deadline_s=10.0, on_deadline="replace"))
    stuck = world.orders[2]
    for order in [o for o in world.orders if o != stuck]:
        world.end(order)
    world.feed(Tick(10.0))
    assert DropGroup(1) in world.log
    world.end(stuck, now=10.0, reason=Reason.DEADLINE, reward=None)
    world.drain()
    assert [a.groups for a in world.log if isinstance(a, TrainGroups)] == [(0, 2, 3, 4), (5, 6, 7, 8)]


def late_rounds(world, rounds):
    """Deadlines at which nobody has ended, each answered as cancelled."""
    for number in range(1, rounds + 1):
        stuck, now = world.orders[:], 10.0 * number
        world.feed(Tick(now))
        for order in stuck:
            world.end(order, now=now, reason=Reason.DEADLINE, reward=None)


def test_where_every_group_is_late_a_batch_replaces_as_many_as_it_holds_and_then_closes_masked():
    world = World(make(num_batches=2, batch_deadline_s=10.0, on_deadline="replace"))
    late_rounds(world, 2)
    dropped = [a.group for a in world.log if isinstance(a, DropGroup)]
    assert dropped == [0, 1, 2, 3]
    closed = [(a.groups, a.deadlines) for a in world.log if isinstance(a, TrainGroups)]
    assert closed == [((4, 5, 6, 7), 2)]
    late_rounds(world, 1)
    assert [a.group for a in world.log if isinstance(a, DropGroup)] == [0, 1, 2, 3, 8, 9, 10, 11], "each batch anew"


def test_a_resumed_batch_goes_on_counting_what_it_replaced():
    progress = Progress(consumed=frozenset({0, 1}), num_replaced=2)
    world = World(make(progress, num_batches=1, batch_deadline_s=10.0, on_deadline="replace"))
    late_rounds(world, 1)
    assert not [a for a in world.log if isinstance(a, DropGroup)]
    assert [a.groups for a in world.log if isinstance(a, TrainGroups)] == [(2, 3, 4, 5)]


def test_at_its_deadline_an_evaluation_is_recorded_without_who_is_late_and_the_round_has_its_own():
    late = {"eval_deadline_s": 30.0, "batch_deadline_s": 10.0, "on_deadline": "replace"}
    world = World(make(num_batches=1, evals=["e0", "e1", "e2"], max_running=2, **late))
    stuck = world.orders[1]
    world.end(world.orders[0], now=1.0)
    assert world.scheduler.wake_at_s == 30.0
    world.feed(Tick(29.9))
    assert not any(isinstance(a, CancelEpisode) for a in world.log)
    world.feed(Tick(30.0))
    assert {a.episode for a in world.log if isinstance(a, CancelEpisode)} == {order.episode for order in world.orders}
    assert stuck in world.orders and not any(isinstance(a, DropGroup) for a in world.log)
    for order in world.orders[:]:
        world.end(order, now=30.0, reason=Reason.DEADLINE, reward=None)
    assert [a.index for a in world.log if isinstance(a, RecordEval)] == [0]
    assert world.scheduler.wake_at_s == 10.0 and world.scheduler.deadlines == 0, "no deadline of a batch was met"


def test_at_the_deadline_a_group_of_which_nobody_had_begun_is_left_to_the_next_batch():
    world = World(make(num_batches=2, group_size=4, max_running=2, batch_deadline_s=10.0))
    world.feed(Tick(10.0))
    cancelled = [(a.episode, a.reason) for a in world.log if isinstance(a, CancelEpisode)]
    never, late = Reason.NEVER_BEGAN, Reason.DEADLINE
    assert cancelled == [
        (f"train-000000-00{place}", why) for place, why in [(2, never), (3, never), (0, late), (1, late)]
    ]
    for order in world.orders[:]:
        world.end(order, now=10.0, reason=Reason.DEADLINE, reward=None)
    closed = [a for a in world.log if isinstance(a, TrainGroups)]
    assert [(a.groups, a.deadlines, a.postponed) for a in closed] == [((0,), 1, 3)]
    world.drain()
    assert [a.groups for a in world.log if isinstance(a, TrainGroups)] == [(0,), (1, 2, 3, 4)]


def test_a_group_that_had_begun_before_a_crash_is_closed_with_its_batch():
    progress = Progress(incarnations={"train-000001-000": 1})
    world = World(make(progress, num_batches=1, max_running=1, batch_deadline_s=10.0))
    world.feed(Tick(10.0))
    for order in world.orders[:]:
        world.end(order, now=10.0, reason=Reason.DEADLINE, reward=None)
    assert [(a.groups, a.postponed) for a in world.log if isinstance(a, TrainGroups)] == [((0, 1), 2)]


def test_a_group_of_which_nobody_had_begun_is_not_replaced():
    late = {"batch_deadline_s": 10.0, "on_deadline": "replace"}
    world = World(make(num_batches=1, group_size=2, max_running=2, **late))
    stuck = world.orders[:]
    world.feed(Tick(10.0))
    assert [a.group for a in world.log if isinstance(a, DropGroup)] == [0]
    assert world.scheduler.wake_at_s is None, "those that were cancelled hold the slots: nobody's time runs"
    for order in stuck:
        world.end(order, now=25.0, reason=Reason.DEADLINE, reward=None)
    assert world.scheduler.wake_at_s == 35.0
    world.drain()
    assert [a.groups for a in world.log if isinstance(a, TrainGroups)] == [(1, 2, 3, 4)]


def test_failures_of_ours_in_a_row_stop_the_run_with_the_original_traceback():
    world = World(make(num_batches=1, group_size=4, max_failures=3))
    for _ in range(2):
        world.end(world.orders[0], reason=Reason.VERIFIER_CRASH, reward=None, error="Traceback: boom")
    with pytest.raises(RunAborted, match="boom"):
        world.end(world.orders[0], reason=Reason.VERIFIER_CRASH, reward=None, error="Traceback: boom")


def test_every_third_failure_does_not_stop_the_run():
    world = World(make(num_batches=2, group_size=6, max_failures=2))
    count = 0
    while world.orders:
        count += 1
        crash = count % 3 == 0
        world.end(
            world.orders[0], reason=Reason.VERIFIER_CRASH if crash else Reason.DONE, reward=None if crash else 1.0
        )
    assert world.scheduler.finished


def test_each_epoch_asks_every_task_once_in_an_order_of_its_own():
    first, second = ([task_of_group(g, 12, 3) for g in range(e * 12, e * 12 + 12)] for e in (0, 1))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second
    assert [task_of_group(g, 12, 3) for g in range(12)] == first


def test_warm_up_traces_come_in_epochs_whatever_the_batch_size():
    drawn = [i for batch in range(5) for i in traces_of_batch(batch, 7, 35, seed=0)]
    assert sorted(drawn) == list(range(35))


def test_training_without_tasks_is_refused_before_anything_starts():
    with pytest.raises(ValueError, match="no training tasks"):
        make(tasks=[])


def test_a_batch_that_holds_more_groups_than_there_are_tasks_is_whole_and_trained():
    world = World(make(num_batches=1, groups_per_batch=64, tasks=[f"t{n}" for n in range(63)]))
    asked = Counter(order.task for order in world.orders)
    assert (len(asked), sorted(asked.values())[-2:]) == (63, [1, 2]), "the 64th is the first of the next epoch"
