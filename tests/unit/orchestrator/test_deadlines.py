"""Whose time runs when: nobody's is over before it began, and none runs while others hold the slots."""

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.orchestrator.simulated import Simulation

from everlong.contracts.records import Purpose
from everlong.orchestrator.config import AsyncConfig, PartialConfig, RoundsConfig
from everlong.orchestrator.deadlines import Deadlines

TRAIN, OTHER, HELD_OUT = (Purpose.TRAIN, 0), (Purpose.TRAIN, 1), (Purpose.EVAL, 0)


def test_the_clock_of_a_group_begins_with_its_first_member_and_stands_still_while_nobody_of_it_runs():
    clocks = Deadlines()
    clocks.give([TRAIN], 10.0)
    clocks.turn(set(), {TRAIN}, 100.0)
    assert clocks.next_at_s is None
    clocks.turn({TRAIN}, {TRAIN}, 200.0)
    assert clocks.next_at_s == 210.0
    clocks.turn({OTHER}, {TRAIN}, 204.0)
    assert clocks.next_at_s is None and not clocks.late(1e9)
    clocks.turn({TRAIN}, set(), 300.0)
    assert clocks.next_at_s == 306.0 and clocks.late(306.0) == {TRAIN} and not clocks.late(305.0)


def test_an_evaluation_that_goes_first_stops_the_clock_of_a_group_whose_members_wait():
    clocks = Deadlines()
    clocks.give([TRAIN], 10.0)
    clocks.give([OTHER], 10.0)
    clocks.give([HELD_OUT], 50.0)
    clocks.turn({TRAIN, OTHER, HELD_OUT}, {OTHER}, 0.0)
    assert clocks.late(10.0) == {TRAIN}, "of the other group a member waits for a slot that the evaluation has"
    assert clocks.late(50.0) == {TRAIN, HELD_OUT}


def test_an_evaluation_that_waits_for_a_slot_of_training_has_time_and_training_has_none():
    clocks = Deadlines()
    clocks.give([TRAIN], 10.0)
    clocks.give([HELD_OUT], 10.0)
    clocks.turn({TRAIN, HELD_OUT}, {TRAIN, HELD_OUT}, 0.0)
    assert clocks.late(10.0) == {TRAIN}
    clocks.turn({HELD_OUT}, {TRAIN, HELD_OUT}, 4.0)
    assert clocks.late(13.0) == set() and clocks.late(14.0) == {HELD_OUT}


def test_a_pause_stops_every_clock():
    clocks = Deadlines()
    clocks.give([TRAIN], 10.0)
    clocks.turn({TRAIN}, set(), 0.0)
    clocks.paused = True
    clocks.turn({TRAIN}, set(), 3.0)
    clocks.paused = False
    clocks.turn({TRAIN}, set(), 1000.0)
    assert clocks.next_at_s == 1007.0


def two_slots(kind, **changes):
    """Two groups of four; an episode takes 1 s, a held-out one 6."""
    defaults = {"num_batches": 2, "groups_per_batch": 2, "group_size": 4, "max_running": 2, "eval_every": 1}
    return Simulation(
        kind(**{**defaults, **changes}), lambda order: 6.0 if order.purpose is Purpose.EVAL else 1.0, num_evals=4
    )


@pytest.mark.parametrize("kind", [PartialConfig, AsyncConfig])
def test_an_evaluation_that_goes_first_costs_no_group_its_time(kind):
    run = two_slots(kind, group_deadline_s=4.0)
    run.num_evals = 4
    run.run()
    assert set(run.ends.values()) == {"done"}


def test_groups_that_wait_for_slots_lose_no_time():
    schedule = AsyncConfig(
        num_batches=6, groups_per_batch=2, group_size=2, max_running=2, max_staleness=3, group_deadline_s=4.0
    )
    assert set(Simulation(schedule, lambda order: 1.0).run().ends.values()) == {"done"}


def test_an_evaluation_loses_no_time_while_training_holds_its_slots():
    schedule = AsyncConfig(
        num_batches=2,
        groups_per_batch=2,
        group_size=1,
        max_running=4,
        eval_every=1,
        max_staleness=3,
        eval_deadline_s=2.0,
    )

    def duration_s(order):
        return 1.0 if order.purpose is Purpose.EVAL or order.group < 2 else 100.0

    run = Simulation(schedule, duration_s, num_evals=1).run()
    assert set(run.ends.values()) == {"done"}


def test_a_pause_is_not_time_of_a_group():
    schedule = PartialConfig(num_batches=2, groups_per_batch=2, group_size=1, completion=0.5, group_deadline_s=10.0)
    run = Simulation(schedule, lambda order: 8.0 if order.group == 1 else 1.0, train_s=100.0).run()
    assert set(run.ends.values()) == {"done"}


def test_members_that_others_left_no_slot_until_the_deadline_are_said_apart():
    schedule = AsyncConfig(num_batches=1, groups_per_batch=1, group_size=4, max_running=1, group_deadline_s=10.0)
    run = Simulation(schedule, lambda order: 100.0).run()
    reasons = [str(run.ends[f"train-000000-00{place}"]) for place in range(4)]
    assert reasons == ["deadline", "never_began", "never_began", "never_began"]


KINDS = {
    "rounds": lambda replace, share, age, deadline_s: RoundsConfig(
        batch_deadline_s=deadline_s, on_deadline="replace" if replace else "mask"
    ),
    "partial": lambda replace, share, age, deadline_s: PartialConfig(completion=share, group_deadline_s=deadline_s),
    "async": lambda replace, share, age, deadline_s: AsyncConfig(
        max_staleness=age, on_over_age="mask" if replace else "wait", group_deadline_s=deadline_s
    ),
}

SCHEDULES = st.builds(
    lambda kind, replace, share, age, deadline_s, **common: KINDS[kind](replace, share, age, deadline_s).model_copy(
        update={"num_batches": 4, **common}
    ),
    st.sampled_from(sorted(KINDS)),
    st.booleans(),
    st.floats(0.05, 1.0),
    st.integers(0, 3),
    st.floats(1.0, 60.0),
    group_size=st.integers(1, 3),
    groups_per_batch=st.integers(1, 4),
    max_running=st.integers(1, 12),
    eval_every=st.integers(0, 2),
    eval_deadline_s=st.floats(1.0, 60.0),
)


def simulated(schedule, seed, stuck=0.0, quick_s=None):
    """Of the episodes the share `stuck` never ends; the others last 1 to 20 s, or less than `quick_s` says by purpose."""

    def duration_s(order):
        chance = zlib.crc32(f"{order.episode} {seed}".encode()) / 2**32
        if chance < stuck:
            return 1e9
        return 1.0 + 19.0 * chance if quick_s is None else chance * quick_s[order.purpose]

    run = Simulation(schedule, duration_s, train_s=30.0, publish_s=0.5, update_s=1.0, num_evals=2)
    run.num_evals = 2
    return run.run(max_events=20_000)


@settings(max_examples=300, deadline=None)
@given(SCHEDULES, st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_no_group_is_closed_without_a_member_that_had_begun(schedule, seed, stuck):
    run = simulated(schedule, seed, stuck)
    assert [batch.batch for batch in run.trained] == list(range(4)) and not run.alive, "whoever is stuck, the run ends"
    groups = [group for batch in run.trained for group in batch.groups]
    assert len(set(groups)) == len(groups) and all(batch.groups for batch in run.trained)
    for group in groups:
        members = [f"train-{group:06d}-{attempt:03d}" for attempt in range(schedule.group_size)]
        assert not run.cancelled_at_once.issuperset(members), f"of group {group} nobody had begun"
    assert {name for name, reason in run.ends.items() if reason == "never_began"} <= run.cancelled_at_once


@settings(max_examples=200, deadline=None)
@given(SCHEDULES, st.integers(0, 2**32 - 1))
def test_whoever_needs_no_more_than_its_time_is_never_cancelled_however_long_it_waits(schedule, seed):
    """Of a group, and of an evaluation, the members one after the other need less than the deadline."""
    quick_s = {Purpose.EVAL: schedule.eval_deadline_s / 2.01}
    if isinstance(schedule, RoundsConfig):
        quick_s[Purpose.TRAIN] = schedule.batch_deadline_s / (schedule.group_size * schedule.groups_per_batch + 0.01)
    else:
        quick_s[Purpose.TRAIN] = schedule.group_deadline_s / (schedule.group_size + 0.01)
    run = simulated(schedule, seed, quick_s=quick_s)
    assert set(run.ends.values()) == {"done"}
