"""Partial rollout as a pure machine: when it pauses, who goes on, what trains; and what it is worth on long tails."""

import math
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.orchestrator.simulated import Simulation

from everlong.orchestrator.config import PartialConfig
from everlong.orchestrator.events import PauseSampling, ResumeSampling, RunEpisode, TrainGroups


def config(**changes):
    defaults = {"num_batches": 3, "groups_per_batch": 4, "group_size": 2, "group_deadline_s": None, "completion": 0.75}
    return PartialConfig(**{**defaults, **changes})


def test_sampling_pauses_when_the_share_of_the_episodes_has_ended():
    # groups 0, 1, 2 end whole after 1 to 6 s; of group 3 one member ends after 7 and one after 8
    run = Simulation(config(), lambda order: 1.0 + 2 * order.group + order.attempt, train_s=1.0)
    run.run(until=lambda: bool(run.trained))
    assert (run.now_s, run.trained[0].groups, len(run.alive)) == (6.0, (0, 1, 2), 2), "6 = ceil(0.75 * 4 * 2)"
    assert isinstance(run.log[-2], PauseSampling) and isinstance(run.log[-1], TrainGroups)


def test_who_had_not_ended_goes_on_first_and_free_places_are_filled_at_once():
    run = Simulation(config(), lambda order: 1.0 + 2 * order.group + order.attempt, train_s=50.0)
    run.run(until=lambda: run.held == 1)
    begun = [
        a.order for a in run.log[run.log.index(TrainGroups(0, (0, 1, 2), save=True)) :] if isinstance(a, RunEpisode)
    ]
    assert [(order.group, order.attempt) for order in begun] == [
        (group, attempt) for group in (4, 5, 6) for attempt in (0, 1)
    ]
    assert isinstance(run.log[-7], ResumeSampling), "before anybody new begins"
    assert len(run.alive) == 8
    run.run(until=lambda: len(run.trained) == 2)
    assert 3 in run.trained[1].groups


def test_a_pause_costs_no_episode_anything_and_its_tokens_carry_both_versions():
    run = Simulation(config(num_batches=2), lambda order: 1.0 + 2 * order.group + order.attempt, train_s=50.0)
    run.run(until=lambda: "train-000003-001" in run.versions)
    assert run.now_s == 58.0, "8 s of its own and a pause of 50"
    assert run.versions["train-000003-001"] == {0, 1}


def test_a_pause_waits_for_a_whole_group():
    # first members end at once, second members late: the share is reached long before a group is complete
    run = Simulation(config(completion=0.25), lambda order: 1.0 + 100.0 * order.attempt + order.group)
    run.run(until=lambda: bool(run.trained))
    assert run.trained[0].groups == (0,) and run.now_s == 101.0


def test_the_last_batch_waits_for_everybody_and_nothing_is_left_under_way():
    run = Simulation(config(), lambda order: 100.0 if order.group == 1 else 1.0 + order.attempt).run()
    groups = [group for batch in run.trained for group in batch.groups]
    assert sorted(groups) == list(range(max(groups) + 1)) and 1 in run.trained[-1].groups
    assert not run.alive


def test_a_whole_share_is_a_round_of_all():
    run = Simulation(config(completion=1.0), lambda order: 1.0 + order.group).run()
    assert [batch.groups for batch in run.trained] == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11)]
    assert all(batch.oldest == batch.batch for batch in run.trained)


def test_shares_that_floats_cannot_hold_pause_where_they_say():
    run = Simulation(config(completion=0.07, groups_per_batch=100, group_size=1), lambda order: 1.0 + order.group)
    run.run(until=lambda: bool(run.trained))
    assert run.now_s == 7.0


def test_an_episode_that_never_returns_is_masked_at_the_deadline_of_its_group():
    stuck = "train-000001-001"
    run = Simulation(
        config(completion=1.0, num_batches=2, group_deadline_s=10.0),
        lambda order: 1e9 if order.episode == stuck else 1.0,
    ).run()
    assert (run.trained[0].at_s, run.trained[0].deadlines, run.trained[1].deadlines) == (10.0, 1, 0)


@settings(max_examples=150, deadline=None)
@given(
    st.builds(
        lambda size, groups, share, running: config(
            num_batches=5, group_size=size, groups_per_batch=groups, completion=share, max_running=running, eval_every=2
        ),
        st.integers(1, 3),
        st.integers(1, 4),
        st.floats(0.05, 1.0),
        st.integers(1, 12),
    ),
    st.lists(st.integers(0, 80), max_size=4),
    st.integers(0, 2**32 - 1),
)
def test_wherever_and_however_often_it_is_killed_every_group_trains_once(schedule, kills, seed):
    def simulation(progress=None, versions=None):
        return Simulation(
            schedule,
            lambda order: 1.0 + zlib.crc32(f"{order.episode} {seed}".encode()) % 20,
            train_s=3.0,
            publish_s=0.5,
            update_s=1.0,
            num_evals=2,
            progress=progress,
            versions=versions,
        )

    run, trained, evals = simulation(), {}, {}
    for steps in [*kills, None]:
        if steps is None:
            run.run()
        for _ in range(steps or 0):
            if run.scheduler.finished or not run.step():
                break
        trained.update({batch.batch: batch for batch in run.trained if batch.batch < run.version or steps is None})
        evals.update(dict(run.evals))
        if steps is not None:
            progress = run.progress()
            run = simulation(progress, dict(run.versions))
            run.consumed_before, run.evals_before = progress.consumed, progress.evals
    groups = [group for batch in trained.values() for group in batch.groups]
    assert sorted(trained) == list(range(5)) and all(batch.groups for batch in trained.values())
    assert sorted(groups) == list(range(len(groups))), "each once, none lost, none skipped"
    assert sorted(evals) == [0, 2, 4, 5]
    assert not run.alive


# What it is worth ----------------------------------------------------------------------------------------------------

SLOTS, MEAN_S = 64, 3600.0
"""8 groups of 8, whose episodes last an hour in the mean."""
BOUND = 3600 * SLOTS / MEAN_S
"""Samples per hour if no slot were ever empty."""
PAUSE_S = 10.0
"""Training and the update, in which nothing is sampled."""
FROM, TO = 20, 80
"""Rounds between which is measured: before, slots and groups still fill."""


def long_tailed_s(order):
    """Log-normal, sigma 1: the longest of 64 lasts about 9 times the median."""
    rng = np.random.default_rng([order.group, order.attempt])
    return MEAN_S * math.exp(rng.normal(-0.5, 1.0))


def trained_samples(run, rounds):
    """In whole groups, and the hours that it took."""
    run.run(until=lambda: run.version == rounds)
    return np.array([sum(8 * len(batch.groups) for batch in run.trained[:rounds]), run.now_s / 3600])


def share_of_the_bound(completion):
    schedule = config(groups_per_batch=8, group_size=8, completion=completion, num_batches=TO + 1)
    run = Simulation(schedule, long_tailed_s, train_s=PAUSE_S)
    first, before, after = (trained_samples(run, rounds) for rounds in (1, FROM, TO))
    samples, hours = after - before
    print(
        f"completion {completion}: {samples / hours / BOUND:.3f} of the bound, first round {first[0] / first[1] / BOUND:.3f}"
    )
    return samples / hours / BOUND


def test_after_twenty_rounds_the_best_share_reaches_nine_tenths_of_what_the_slots_allow():
    shares = {completion: share_of_the_bound(completion) for completion in (0.1, 0.25, 0.5, 0.75, 1.0)}
    assert max(shares.values()) == max(shares[0.1], shares[0.25]) >= 0.9
    assert list(shares.values())[1:] == sorted(list(shares.values())[1:], reverse=True)
    assert shares[1.0] < 0.2, "rounds of all wait for the longest"


@pytest.mark.parametrize("completion", [0, -0.5, 1.5])
def test_a_share_is_above_zero_and_at_most_one(completion):
    with pytest.raises(ValueError, match="completion"):
        config(completion=completion)
