"""Age is of tokens: what is masked, what it is called, and what the histogram shows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlong.contracts.errors import Reason
from everlong.contracts.records import Episode, EpisodeOrder, FinishReason, Purpose, ScoredGroup, Turn, Verdict
from everlong.contracts.tokens import TokenColumns
from everlong.ledger.facts import EpisodeState
from everlong.orchestrator.outcomes import train_outcomes
from everlong.trajectories.admission import AdmissionConfig, admit_group
from everlong.trajectories.packing import PackingConfig, pack_batch
from everlong.trajectories.staleness import ages_of, mask_over_age, staleness_stats


def turn(index, versions, num_masked=0):
    sampled = TokenColumns.sampled_tokens([7] * len(versions), [-0.1] * len(versions), version=versions)
    sampled = sampled.replace(trainable=np.arange(len(versions)) >= num_masked)
    return Turn(
        index=index,
        parent=index - 1,
        context=TokenColumns.context([1, 2]),
        sampled=sampled,
        finish_reason=FinishReason.STOP,
    )


def episode(*turns, attempt=0, reward=1.0):
    order = EpisodeOrder(task="t", group=0, attempt=attempt, purpose=Purpose.TRAIN)
    return Episode(order=order, reason=Reason.DONE, verdict=Verdict(reward=reward), turns=turns)


def group(*episodes, **fields):
    return ScoredGroup(group=0, task="t", episodes=episodes, credits=(0.5,) * len(episodes), **fields)


def packed(*episodes, batch, max_staleness):
    return pack_batch(batch, [group(*episodes)], PackingConfig(), AdmissionConfig(), 0, max_staleness)


def test_age_is_judged_by_every_token_and_not_by_the_newest():
    columns = turn(0, [3] + [5] * 9).sampled
    ages = ages_of(columns, 6)
    assert (ages.max(), ages.mean()) == (3, pytest.approx(1.2))
    assert staleness_stats([columns], 6) == {
        "staleness/share/0": 0.0,
        "staleness/share/1": 0.9,
        "staleness/share/2": 0.0,
        "staleness/share/3": 0.1,
    }


def test_only_the_tokens_beyond_the_bound_are_masked_and_the_branch_trains_on():
    one = packed(episode(turn(0, [3, 4, 5]), turn(1, [6, 6])), batch=6, max_staleness=1)
    (outcome,) = one.outcomes.values()
    assert (outcome.trained, outcome.discarded) == (3, {"over_age": 2})
    columns = one.train_batch.micro_batches[0].columns
    assert columns.versions[columns.trainable].tolist() == [5, 6, 6]
    assert columns.num_sampled == 5, "what is masked stays, as context of what follows"
    assert one.stats["tokens/discarded/over_age"] == 2
    assert one.stats["staleness/share/1"] == pytest.approx(1 / 3)


def test_a_token_that_is_as_old_as_the_bound_still_trains():
    assert packed(episode(turn(0, [4, 4])), batch=6, max_staleness=2).train_batch.num_trainable == 2
    assert packed(episode(turn(0, [4, 4])), batch=6, max_staleness=1).train_batch.num_trainable == 0
    assert packed(episode(turn(0, [0, 0])), batch=6, max_staleness=None).train_batch.num_trainable == 2


def test_an_episode_of_old_tokens_alone_ends_as_discarded_over_age():
    old = episode(turn(0, [1, 1, 1]))
    outcomes = packed(old, episode(turn(0, [6]), attempt=1), batch=6, max_staleness=2).outcomes

    class View:
        stray_tokens = {}

    ends = train_outcomes([old], outcomes, {old.id: View()})  # type: ignore[dict-item]
    assert [(end.state, end.reason, end.trained, end.discarded) for end in ends] == [
        (EpisodeState.DISCARDED, "over_age", 0, {"over_age": 3})
    ]


def test_a_group_without_signal_is_named_for_that_and_not_for_its_age():
    admitted = admit_group(group(episode(turn(0, [1, 6])), discarded="zero_signal"), AdmissionConfig(), 0, 5)
    assert admitted[0].outcome.discarded == {"zero_signal": 2}


def test_a_token_that_its_turn_masks_is_not_counted_as_over_age():
    masked, count = mask_over_age(episode(turn(0, [1, 1, 6], num_masked=1)), 5)
    assert count == 1 and masked.turns[0].sampled.trainable.tolist() == [False, False, True]


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6), min_size=1, max_size=5),
    st.integers(0, 9),
    st.none() | st.integers(0, 9),
)
def test_every_token_is_accounted_for_and_none_that_trains_is_too_old(versions, batch, bound):
    versions = [[min(version, batch) for version in turn_versions] for turn_versions in versions]
    one = packed(episode(*(turn(index, some) for index, some in enumerate(versions))), batch=batch, max_staleness=bound)
    (outcome,) = one.outcomes.values()
    assert outcome.trained + sum(outcome.discarded.values()) == sum(map(len, versions))
    old = sum(bound is not None and batch - version > bound for some in versions for version in some)
    assert outcome.discarded.get("over_age", 0) == old
    shares = [value for name, value in one.stats.items() if name.startswith("staleness/share/")]
    assert sum(shares) == pytest.approx(1.0) if outcome.trained else not shares
