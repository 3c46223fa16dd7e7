from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everlong.contracts.errors import Reason
from everlong.contracts.records import Episode, EpisodeOrder, FinishReason, Purpose, ScoredGroup, Turn, Verdict
from everlong.contracts.tokens import TokenColumns
from everlong.trajectories.admission import AdmissionConfig, admit_branches, admit_group
from everlong.trajectories.tree import ROLES

DEFAULT = AdmissionConfig()


def turn(index, parent, num_tokens, role="main", *, num_masked=0, finish_reason=FinishReason.STOP):
    sampled = TokenColumns.sampled_tokens([7] * num_tokens, [-0.1] * num_tokens, version=0)
    trainable = np.arange(num_tokens) >= num_masked
    return Turn(
        index=index,
        parent=parent,
        context=TokenColumns.context([1, 2]),
        sampled=sampled.replace(trainable=trainable),
        finish_reason=finish_reason,
        role=role,
    )


def episode(turns, attempt=0, reward=1.0, reason=Reason.DONE, num_discarded=0):
    order = EpisodeOrder(task="t", group=0, attempt=attempt, purpose=Purpose.TRAIN)
    verdict = Verdict(reward=reward)
    return Episode(order=order, reason=reason, verdict=verdict, turns=tuple(turns), num_discarded=num_discarded)


def admit(*episodes, config=DEFAULT, seed=0, **fields):
    credits = tuple(None if e.reward is None else 0.5 for e in episodes)
    return admit_group(ScoredGroup(group=0, task="t", episodes=episodes, credits=credits, **fields), config, seed)


def outcome(*episodes, **fields):
    tokens = admit(*episodes, **fields)[0].outcome
    return tokens.trained, tokens.discarded


TREE = [turn(0, -1, 5), turn(1, 0, 50), turn(2, 1, 40), turn(3, 1, 10, "summary"), turn(4, 0, 30, "sub_agent")]


@pytest.mark.parametrize("seed", range(5))
def test_main_branch_owns_what_it_shares_with_summary_and_sub_agent(seed):
    branches = admit_branches(episode(TREE), 5, np.random.default_rng(seed))
    assert [(b.role, b.num_trained) for b in branches] == [("main", 95), ("summary", 10), ("sub_agent", 30)]
    assert [b.path for b in branches] == [(0, 1, 2), (0, 1, 3), (0, 4)]


def test_branches_beyond_the_limit_are_discarded_by_name():
    assert outcome(episode(TREE), config=AdmissionConfig(max_branches=2)) == (105, {"not_admitted": 30})
    assert outcome(episode(TREE), config=AdmissionConfig(max_branches=1)) == (95, {"not_admitted": 40})


def test_branch_is_drawn_in_proportion_to_its_own_untrained_tokens():
    """Shared turn of 1, leaves of 1 and 3: first choices in the ratio 2 to 4."""
    forked = episode([turn(0, -1, 1), turn(1, 0, 1), turn(2, 0, 3)])
    first = Counter(admit_branches(forked, 1, np.random.default_rng(seed))[0].path[-1] for seed in range(600))
    assert abs(first[1] - 200) < 50 and first[1] + first[2] == 600


def test_draw_depends_on_seed_group_and_attempt_and_on_no_neighbour():
    forked = [turn(0, -1, 10), *(turn(i, 0, 10) for i in range(1, 20))]
    one, two = episode(forked, attempt=0), episode(forked, attempt=1)
    both = [a.branches for a in admit(two, one)]
    assert both == [admit(one)[0].branches, admit(two)[0].branches]
    assert both[0] != both[1]
    assert admit(one, seed=1)[0].branches != both[0]


def test_branch_with_nothing_of_its_own_to_train_is_not_admitted():
    silent = episode([turn(0, -1, 4), turn(1, 0, 3), turn(2, 0, 0)])
    branches = admit(silent)[0].branches
    assert sum(b.num_trained for b in branches) == 7
    assert admit(episode([turn(0, -1, 0)]))[0].branches == ()


def test_token_that_its_turn_masks_is_neither_trained_nor_lost():
    assert outcome(episode([turn(0, -1, 5, num_masked=3)])) == (2, {"masked": 3})


def test_episode_without_verdict_trains_nowhere_and_its_tokens_are_counted():
    assert outcome(episode([turn(0, -1, 5)], reward=None)) == (0, {"no_verdict": 5})
    crashed = episode([turn(0, -1, 5)], reason=Reason.SANDBOX_CRASH, num_discarded=2)
    assert outcome(crashed) == (0, {"no_verdict": 5, "not_in_tree": 2})


def test_episode_that_failed_before_its_first_token_brings_none():
    assert outcome(episode([], reward=None, reason=Reason.NOTHING_SAMPLED)) == (0, {})


def test_group_without_signal_is_dropped_or_kept_with_credit_zero():
    members = [episode([turn(0, -1, 5)])]
    assert outcome(*members, discarded="zero_signal") == (0, {"zero_signal": 5})
    assert outcome(*members, discarded="zero_signal", config=AdmissionConfig(zero_signal="keep")) == (5, {})


def test_group_with_too_few_verdicts_is_never_kept():
    config = AdmissionConfig(zero_signal="keep")
    lonely, silent = episode([turn(0, -1, 5)]), episode([turn(0, -1, 4)], attempt=1, reward=None)
    first, second = admit(lonely, silent, discarded="too_few_verdicts", config=config)
    assert first.outcome.discarded == {"too_few_verdicts": 5}
    assert second.outcome.discarded == {"no_verdict": 4}


OVERLONG = {
    "context full": (episode([turn(0, -1, 5)], reason=Reason.CONTEXT_FULL), True),
    "last turn cut": (episode([turn(0, -1, 5, finish_reason=FinishReason.LENGTH)]), True),
    "earlier turn cut": (episode([turn(0, -1, 5, finish_reason=FinishReason.LENGTH), turn(1, 0, 1)]), False),
    "only a sub-agent cut": (
        episode([turn(0, -1, 5), turn(1, -1, 2, "sub_agent", finish_reason=FinishReason.LENGTH)]),
        False,
    ),
    "not cut": (episode([turn(0, -1, 5)]), False),
}


@pytest.mark.parametrize(("cut", "masked"), OVERLONG.values(), ids=OVERLONG.keys())
def test_episode_cut_off_by_a_length_limit_is_masked_on_request(cut, masked):
    assert outcome(cut) == (cut.num_sampled, {})
    expected = (0, {"overlong_masked": cut.num_sampled}) if masked else (cut.num_sampled, {})
    assert outcome(cut, config=AdmissionConfig(overlong="mask")) == expected


@st.composite
def episodes(draw):
    turns = []
    for index in range(draw(st.integers(0, 8))):
        size = draw(st.integers(0, 4))
        turns.append(
            turn(
                index,
                draw(st.integers(-1, index - 1)),
                size,
                draw(st.sampled_from(ROLES)),
                num_masked=draw(st.integers(0, size)),
                finish_reason=draw(st.sampled_from(FinishReason)),
            )
        )
    return episode(
        turns,
        reward=draw(st.sampled_from([None, 0.0, 1.0])),
        reason=draw(st.sampled_from(Reason)),
        num_discarded=draw(st.integers(0, 3)),
    )


@settings(max_examples=60, deadline=None)
@given(
    member=episodes(),
    discarded=st.sampled_from([None, "zero_signal", "too_few_verdicts"]),
    zero_signal=st.sampled_from(["drop", "keep"]),
    overlong=st.sampled_from(["train", "mask"]),
    max_branches=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_every_sampled_token_is_trained_or_discarded_by_name(
    member, discarded, zero_signal, overlong, max_branches, seed
):
    config = AdmissionConfig(zero_signal=zero_signal, overlong=overlong, max_branches=max_branches)
    admitted = admit(member, config=config, seed=seed, discarded=discarded)[0]
    tokens = admitted.outcome
    assert tokens.trained + sum(tokens.discarded.values()) == member.num_sampled
    assert all(count > 0 for count in tokens.discarded.values())
    assert tokens.trained == sum(branch.num_trained for branch in admitted.branches)
    assert len(admitted.branches) <= max_branches and all(branch.num_trained for branch in admitted.branches)
    priorities = [ROLES.index(branch.role) for branch in admitted.branches]
    assert priorities == sorted(priorities)
