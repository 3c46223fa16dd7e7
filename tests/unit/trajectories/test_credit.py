import itertools

import numpy as np
import pytest

from everlong.contracts.errors import Reason
from everlong.contracts.records import MAX_REWARD, Episode, EpisodeOrder, FinishReason, Purpose, Turn, Verdict
from everlong.contracts.tokens import TokenColumns
from everlong.trajectories.credit import GroupMeanConfig, score_group
from everlong.trajectories.credit.overlong import Budget, NoPunishment, SoftPunishment, punished

GRPO = GroupMeanConfig(scale="std_sample")
POPULATION = GroupMeanConfig(scale="std_population")
DR_GRPO = GroupMeanConfig(scale="none")
RLOO = GroupMeanConfig(scale="none", leave_one_out=True)


def episode(attempt, reward, *, group=0, task="t", reason=Reason.DONE, num_turns=0):
    turns = tuple(
        Turn(
            index=i,
            parent=i - 1,
            context=TokenColumns.context([1]),
            sampled=TokenColumns.sampled_tokens([2], [-0.1], version=0),
            finish_reason=FinishReason.STOP,
        )
        for i in range(num_turns)
    )
    order = EpisodeOrder(task=task, group=group, attempt=attempt, purpose=Purpose.TRAIN)
    return Episode(order=order, reason=reason, verdict=Verdict(reward=reward), turns=turns)


def scored(rewards, config):
    return score_group(0, "t", [episode(i, reward) for i, reward in enumerate(rewards)], config)


CREDITS = {
    "GRPO": (GRPO, [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
    "Dr. GRPO, from all rewards and not the first": (DR_GRPO, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    "RLOO": (RLOO, [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
    "population": (POPULATION, [1, 0, 1, 0], [1, -1, 1, -1]),
    "sample": (GRPO, [1, 0, 1, 0], [0.866025, -0.866025, 0.866025, -0.866025]),
    "no verdict": (DR_GRPO, [1, 0, None, 1], [0.333333, -0.666667, None, 0.333333]),
    "no verdict, population": (POPULATION, [1, 0, None, 1], [0.707107, -1.414214, None, 0.707107]),
}


@pytest.mark.parametrize(("config", "rewards", "credits"), CREDITS.values(), ids=CREDITS.keys())
def test_credit_is_what_was_worked_out_by_hand(config, rewards, credits):
    group = scored(rewards, config)
    assert group.discarded is None
    for got, expected in zip(group.credits, credits, strict=True):
        assert got == (None if expected is None else pytest.approx(expected, abs=4e-6))


def test_episode_without_verdict_leaves_the_baseline():
    assert scored([1, 0, None, 1], GRPO).baseline == pytest.approx(0.666667, abs=1e-6)


def test_failure_before_the_first_token_leaves_the_baseline():
    failed = episode(3, 0.0, reason=Reason.NOTHING_SAMPLED)
    group = score_group(0, "t", [episode(0, 1.0), episode(1, 0.0), episode(2, 1.0), failed], DR_GRPO)
    assert group.baseline == pytest.approx(0.666667, abs=1e-6)
    assert group.credits[3] is None and failed.num_sampled == 0


@pytest.mark.parametrize("config", [GRPO, POPULATION, DR_GRPO, RLOO])
@pytest.mark.parametrize(
    "rewards", [[0.4] * 4, [0.1 + 0.2, 0.3], [0.1, 0.10000000149]], ids=["same", "sums", "float32"]
)
def test_equal_rewards_give_credit_exactly_zero(config, rewards):
    group = scored(rewards, config)
    assert group.credits == (0.0,) * len(rewards)
    assert group.discarded == "zero_signal"


def test_one_survivor_of_four_is_dropped_and_has_no_credit():
    group = scored([1, None, None, None], GRPO)
    assert group.discarded == "too_few_verdicts"
    assert group.credits == (None,) * 4 and group.baseline is None


def test_group_of_one_never_trains():
    assert scored([1], GRPO).discarded == "too_few_verdicts"
    with pytest.raises(ValueError):
        GroupMeanConfig(min_verdicts=1)


def test_whether_one_lost_member_costs_the_group_is_a_setting():
    rewards = [1, 0, 1, 0, 1, 0, 1, None]
    assert scored(rewards, GroupMeanConfig()).discarded is None
    assert scored(rewards, GroupMeanConfig(min_verdicts=8)).discarded == "too_few_verdicts"


def test_turns_are_no_members_of_the_group():
    lengths, rewards = [2, 1, 2, 1], [1, 0, 1, 0]
    episodes = [episode(i, r, num_turns=n) for i, (r, n) in enumerate(zip(rewards, lengths, strict=True))]
    group = score_group(0, "t", episodes, DR_GRPO)
    assert group.baseline == 0.5 and group.credits == (0.5, -0.5, 0.5, -0.5)


def test_groups_whose_names_collide_when_joined_stay_apart():
    one = score_group(0, "a:b", [episode(i, r, group=0, task="a:b") for i, r in enumerate([1, 0])], DR_GRPO)
    two = score_group(1, "a", [episode(i, r, group=1, task="a") for i, r in enumerate([1, 1])], DR_GRPO)
    assert (one.baseline, two.baseline) == (0.5, 1.0)
    with pytest.raises(ValueError, match="expected episodes of group 0 at task 'a:b'"):
        score_group(0, "a:b", [*one.episodes, *two.episodes], DR_GRPO)


def test_credit_does_not_depend_on_the_order_of_the_episodes():
    rewards = [0.1, 0.7, 0.2, 1e-3]
    for order in itertools.permutations(range(4)):
        group = scored([rewards[i] for i in order], GRPO)
        assert dict(zip(order, group.credits, strict=True)) == dict(enumerate(scored(rewards, GRPO).credits))


def test_reward_that_is_no_number_and_episode_that_comes_twice_are_refused():
    with pytest.raises(ValueError, match="a verdict is a finite number"):
        scored([1.0, float("nan")], GRPO)
    with pytest.raises(ValueError, match="holds an episode twice"):
        score_group(0, "t", [episode(0, 1.0), episode(0, 0.0)], GRPO)


def test_leave_one_out_is_refused_with_a_deviation():
    with pytest.raises(ValueError, match="set scale to none, or leave_one_out to false"):
        GroupMeanConfig(scale="std_sample", leave_one_out=True)


@pytest.mark.parametrize("config", [DR_GRPO, RLOO, GRPO, POPULATION], ids=["Dr. GRPO", "RLOO", "sample", "population"])
def test_credit_of_the_largest_rewards_is_a_finite_float32(config):
    credits = scored([MAX_REWARD, -MAX_REWARD], config).credits
    assert np.isfinite(np.array(credits, np.float32)).all() and credits[0] > 0 > credits[1]


@pytest.mark.parametrize("reward", [1e39, -1e39, float("inf"), float("nan")])
def test_a_reward_that_would_make_credit_infinite_is_refused(reward):
    with pytest.raises(ValueError, match="a verdict is a finite number of at most"):
        scored([1, reward], DR_GRPO)


# Length --------------------------------------------------------------------------------------------------------------

SOFT = SoftPunishment(max_tokens=20, buffer_tokens=4)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (21, -1.0), (900, -1.0)]
)
def test_soft_punishment_grows_over_the_buffer(num_tokens, expected):
    assert punished(0.0, num_tokens, SOFT) == expected
    assert punished(1.0, num_tokens, NoPunishment()) == 1.0


def test_what_is_compared_is_the_reward_less_the_punishment():
    """Both right, one at 18 of 20 tokens: 1 and 0.5. The record keeps the verdict."""
    members = [episode(0, 1.0, num_turns=3), episode(1, 1.0, num_turns=18), episode(2, None, num_turns=20)]
    group = score_group(0, "t", members, GroupMeanConfig(scale="none", overlong=SOFT))
    assert group.credits == (0.25, -0.25, None)
    assert (group.baseline, group.discarded) == (0.75, None)
    assert [member.reward for member in group.episodes] == [1.0, 1.0, None]
    assert score_group(0, "t", members, GroupMeanConfig(scale="none")).discarded == "zero_signal"


def test_a_buffer_longer_than_the_limit_is_refused():
    with pytest.raises(ValueError, match="every episode would be punished"):
        SoftPunishment(max_tokens=10, buffer_tokens=11)


@pytest.mark.parametrize(("num_tokens", "reward", "expected"), [(1500, 1.0, 1.0), (1501, 1.0, -1.0), (1501, 0.0, -1.0)])
def test_beyond_its_budget_an_episode_has_minus_one_whatever_its_verdict(num_tokens, reward, expected):
    assert punished(reward, num_tokens, Budget(baseline_tokens=1000, tolerance=1.5)) == expected


def test_what_has_no_verdict_has_none_beyond_its_budget_either():
    members = [episode(0, 1.0, num_turns=3), episode(1, 1.0, num_turns=18), episode(2, None, num_turns=20)]
    budget = Budget(baseline_tokens=10, tolerance=1.0)
    group = score_group(0, "t", members, GroupMeanConfig(scale="none", overlong=budget))
    assert (group.credits, group.baseline) == ((1.0, -1.0, None), 0.0)
    assert [member.reward for member in group.episodes] == [1.0, 1.0, None]


def test_shuffled_credits_are_the_same_ones_dealt_at_random_and_alike_at_every_call():
    plain, shuffled = GroupMeanConfig(), GroupMeanConfig(shuffled=True)
    rewards = [0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    orders = set()
    for group in range(50):
        episodes = [episode(attempt, reward, group=group) for attempt, reward in enumerate(rewards)]
        dealt = score_group(group, "t", episodes, shuffled).credits
        assert sorted(dealt) == sorted(score_group(group, "t", episodes, plain).credits)
        assert dealt == score_group(group, "t", episodes, shuffled).credits
        orders.add(dealt)
    assert len(orders) > 15  # of 28


def test_shuffling_gives_no_credit_to_an_episode_without_a_verdict():
    credits = scored([None, 1.0, 0.0, None], GroupMeanConfig(shuffled=True)).credits
    assert credits[0] is None and credits[3] is None
    assert None not in credits[1:3]
