"""Overlap as a pure machine: bounded age, the offered mix, no starvation, and the same after any crash."""

import zlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.unit.orchestrator.simulated import Simulation

from everlong.contracts.records import Purpose
from everlong.orchestrator.async_scheduler import fits
from everlong.orchestrator.config import AsyncConfig
from everlong.orchestrator.events import CancelEpisode, Publish, RunEpisode, TrainGroups, UpdateEngine
from everlong.orchestrator.progress import Progress

PATTERN = ["A", "B"] * 7 + ["C", "D"]
"""Of tasks A and B seven come for one of C and one of D, which take three times as long."""


def config(**changes):
    defaults = {"num_batches": 6, "groups_per_batch": 2, "group_size": 1, "group_deadline_s": None}
    return AsyncConfig(**{**defaults, **changes})


def letter(group):
    return PATTERN[group % len(PATTERN)]


def offered_mix(num_batches, **changes):
    """Groups that ask the letters in their order; C and D take 3 ticks, A and B and a training step 1."""
    return Simulation(
        config(num_batches=num_batches, **changes),
        lambda order: 3.0 if letter(order.group) in "CD" else 1.0,
        train_s=1.0,
    )


def test_admission_keeps_the_offered_mix_and_throws_no_finished_group_away():
    run = offered_mix(num_batches=60, max_staleness=1)
    run.run(until=lambda: len(run.trained) == 40)
    trained = Counter(letter(group) for batch in run.trained for group in batch.groups)
    assert trained == {"A": 35, "B": 35, "C": 5, "D": 5}
    assert max(batch.batch - batch.oldest for batch in run.trained) == 1
    used = {group for batch in run.trained for group in batch.groups}
    finished = {int(name.split("-")[1]) for name in run.versions}
    assert len(finished - used) <= 4, "whoever finished and is not trained waits for the next batches"
    run.run()
    assert {group for batch in run.trained for group in batch.groups} == set(range(120))


def test_no_more_groups_are_in_flight_than_can_still_be_young_enough():
    run = offered_mix(num_batches=20, max_staleness=1)
    most = 0
    while not run.scheduler.finished and run.step():
        used = {group for batch in run.trained for group in batch.groups}
        most = max(most, len(set(run.opened) - used))
    assert most == 4


def test_a_bound_of_zero_trains_every_token_by_the_current_version_and_still_keeps_a_batch_in_flight():
    run = Simulation(config(max_staleness=0, groups_per_batch=3), lambda order: 5.0, train_s=2.0)
    assert len(run.alive) == 0
    run.run(until=lambda: bool(run.alive))
    assert len(run.alive) == 3
    run.run()
    assert [batch.oldest for batch in run.trained] == [batch.batch for batch in run.trained] == list(range(6))


def test_sampling_goes_on_while_the_trainer_trains():
    def length(max_staleness):
        return (
            Simulation(config(max_staleness=max_staleness, num_batches=40), lambda order: 10.0, train_s=10.0)
            .run()
            .now_s
        )

    assert length(0) == pytest.approx(2 * length(1), rel=0.05)


def test_after_an_update_every_free_place_is_filled_at_once():
    run = Simulation(config(max_staleness=1, groups_per_batch=4, group_size=3), lambda order: 10.0, train_s=1.0)
    run.run(until=lambda: len(run.trained) == 2)
    run.run(until=lambda: run.held == 2)
    asked = Counter(a.order.task for a in run.log if isinstance(a, RunEpisode))
    assert len(run.alive) == 2 * 4 * 3, "two batches of groups, all their members"
    assert len(asked) == 12, "of every task, not of one"


def test_the_oldest_complete_groups_train_first_and_a_slow_one_is_passed_while_it_stays_young_enough():
    run = Simulation(
        config(max_staleness=3, num_batches=8), lambda order: 9.5 if order.group == 0 else 1.0, train_s=1.0
    ).run()
    order = [batch.groups for batch in run.trained]
    place = next(place for place, groups in enumerate(order) if 0 in groups)
    assert 0 < place <= 3 and run.trained[place].oldest >= place - 3
    assert [group for groups in order for group in sorted(groups) if group] == [
        group for groups in order for group in groups if group
    ]


def test_waiting_holds_training_back_before_a_group_gets_too_old():
    slow = lambda order: 100.0 if order.group == 0 else 1.0  # noqa: E731
    waits = Simulation(config(max_staleness=2, num_batches=8), slow, train_s=1.0).run()
    assert max(batch.batch - batch.oldest for batch in waits.trained) == 2
    goes_on = Simulation(config(max_staleness=2, num_batches=8, on_over_age="mask"), slow, train_s=1.0).run()
    assert goes_on.trained[-1].groups[0] == 0 and goes_on.trained[-1].oldest == 0, "its old tokens are masked"
    assert goes_on.trained[5].at_s < 100 < waits.trained[5].at_s


def test_groups_whose_order_would_break_the_bound_do_not_fit():
    assert fits([0, 0, 0, 0], 0, 2, 1)
    assert not fits([0, 0, 0, 0, 0], 0, 2, 1)
    assert fits([0, 0, 1, 1], 1, 2, 1)
    assert not fits([0, 0, 0, 1], 1, 2, 1)
    assert fits([], 7, 2, 0)


def test_a_version_is_published_every_so_many_batches_and_for_every_evaluation():
    run = Simulation(
        config(num_batches=8, publish_every=3, max_staleness=4, eval_every=4), lambda order: 1.0, num_evals=1
    ).run()
    published = [action.policy_version for action in run.log if isinstance(action, UpdateEngine)]
    assert published == [0, 3, 4, 6, 8]
    assert sum(isinstance(action, Publish) for action in run.log) == 5
    assert run.evals == [(0, {0}), (4, {4}), (8, {8})], "one version answers a whole evaluation"


def test_publishing_more_rarely_than_the_bound_allows_is_refused():
    with pytest.raises(ValidationError, match="publish at least every 2 batches, or raise max_staleness to 2"):
        config(publish_every=3, max_staleness=1)


def test_an_episode_that_never_returns_is_masked_at_the_deadline_of_its_group():
    stuck = "train-000001-002"
    run = Simulation(
        config(num_batches=2, groups_per_batch=4, group_size=4, group_deadline_s=10.0, max_staleness=0),
        lambda order: 1e9 if order.episode == stuck else 1.0,
    ).run()
    cancelled = [action.episode for action in run.log if isinstance(action, CancelEpisode)]
    assert cancelled == [stuck]
    assert run.trained[0].at_s == 10.0 and run.trained[0].deadlines == 1 and run.trained[1].deadlines == 0
    assert all(batch.num_episodes == 16 for batch in run.trained)


def test_members_that_never_had_a_turn_do_not_hold_the_deadline_back():
    run = Simulation(
        config(num_batches=1, groups_per_batch=1, group_size=4, max_running=1, group_deadline_s=10.0),
        lambda order: 100.0,
    ).run()
    assert run.trained[0].at_s == 10.0 and run.trained[0].num_episodes == 4


def test_nothing_is_left_under_way_at_the_end_of_the_run():
    run = Simulation(config(num_batches=7, max_staleness=3), lambda order: 1.0 + order.group % 5, train_s=1.0).run()
    assert not run.alive
    assert sorted(group for batch in run.trained for group in batch.groups) == list(range(14))


def test_warm_up_batches_come_first_and_nothing_is_sampled_before_their_version():
    run = Simulation(config(num_batches=3, max_staleness=2), lambda order: 1.0, train_s=1.0, warmup=4).run()
    assert min(order.min_policy_version for order in run.started) == 4
    assert [batch.batch for batch in run.trained] == [4, 5, 6]


def test_a_batch_that_was_complete_before_the_crash_trains_without_waiting_for_anybody():
    versions = {f"train-{group:06d}-000": {0} for group in range(4)}
    progress = Progress(open_groups=dict.fromkeys(range(4), 0), ended=frozenset(versions))
    run = Simulation(config(num_batches=2), lambda order: 1.0, progress=progress, versions=versions).run()
    assert [batch.groups for batch in run.trained] == [(0, 1), (2, 3)] and not run.started


SCHEDULES = st.builds(
    lambda size, groups, staleness, every, over_age, running: config(
        num_batches=6,
        group_size=size,
        groups_per_batch=groups,
        max_staleness=staleness,
        publish_every=min(every, staleness + 1),
        on_over_age=over_age,
        max_running=running,
        eval_every=2,
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 3),
    st.sampled_from(["wait", "mask"]),
    st.integers(1, 12),
)


@settings(max_examples=200, deadline=None)
@given(SCHEDULES, st.lists(st.integers(0, 120), max_size=4), st.integers(0, 2**32 - 1))
def test_wherever_and_however_often_it_is_killed_every_group_trains_once_and_young_enough(schedule, kills, seed):
    def duration_s(order):
        return 1.0 + zlib.crc32(f"{order.episode} {seed}".encode()) % 20

    def simulation(progress=None, versions=None):
        one = Simulation(
            schedule,
            duration_s,
            train_s=3.0,
            publish_s=0.5,
            update_s=1.0,
            num_evals=2,
            progress=progress,
            versions=versions,
        )
        one.num_evals = 2
        return one

    run, trained, evals = simulation(), {}, {}
    for steps in [*kills, None]:
        if steps is None:
            run.run()
        for _ in range(steps or 0):
            if run.scheduler.finished or not run.step():
                break
        closed = [batch for batch in run.trained if batch.batch < run.version or steps is None]
        trained.update({batch.batch: batch for batch in closed})
        evals.update(dict(run.evals))
        if steps is not None:
            progress = run.progress()
            run = simulation(progress, dict(run.versions))
            run.consumed_before, run.evals_before = progress.consumed, progress.evals
            if progress.closed_groups is not None and not run.scheduler.finished:
                run.run(until=lambda run=run: bool(run.trained))
                assert run.trained[0].groups == progress.closed_groups
    groups = [group for batch in trained.values() for group in batch.groups]
    assert sorted(trained) == list(range(6))
    assert sorted(groups) == list(range(6 * schedule.groups_per_batch)), "each once, none lost"
    assert sorted(evals) == [0, 2, 4, 6]
    assert not run.alive
    if schedule.on_over_age == "wait":
        assert max(batch.batch - batch.oldest for batch in trained.values()) <= schedule.max_staleness


def test_while_it_evaluates_no_batch_is_trained():
    run = Simulation(config(num_batches=4, max_staleness=2, eval_every=1), lambda o: 7.0, num_evals=3).run()
    open_eval = False
    for action in run.log:
        if isinstance(action, RunEpisode) and action.order.purpose is Purpose.EVAL:
            open_eval = True
        elif type(action).__name__ == "RecordEval":
            open_eval = False
        assert not (open_eval and isinstance(action, TrainGroups))
