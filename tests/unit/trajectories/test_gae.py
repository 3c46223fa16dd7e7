"""Credit from a critic's values: numbers worked out by hand, and the same however the batch is cut."""

import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.trajectories.test_packing import Builder, episode, path_tokens

from everlong.contracts.errors import Reason
from everlong.contracts.records import EpisodeShare, FinishReason, MicroBatch, ScoredColumns, Segment, TrainBatch
from everlong.contracts.tokens import TokenColumns
from everlong.orchestrator.batches import BatchMaker
from everlong.trajectories.admission import AdmissionConfig, admit_group, continuations
from everlong.trajectories.credit import (
    FixedDecay,
    GaeConfig,
    GroupMeanConfig,
    LengthDecay,
    credit_from_values,
    score_group,
)
from everlong.trajectories.credit.gae import advantages
from everlong.trajectories.credit.overlong import SoftPunishment
from everlong.trajectories.packing import PackingConfig

NAN = math.nan


def gae(**settings):
    return GaeConfig.model_validate(settings)


def fixed(value, **settings):
    return GaeConfig(decay=FixedDecay(value=value), **settings)


# One branch of hand-made tokens --------------------------------------------------------------------------------------


def one_branch(mask, values, reward, after=NAN, truncated=False):
    """A prompt, then tokens that were sampled where the mask says so; the batch and its scores."""
    n = len(mask)
    sampled = np.array(mask, bool)
    tokens = TokenColumns.join(
        [TokenColumns.sampled_tokens([1], [-1.0], version=0) if m else TokenColumns.context([2]) for m in mask]
    )
    columns = TokenColumns.context([0]) + tokens.with_credit(0.0)
    segments = (
        Segment(parent=-1, start=0, length=1, episode=-1),
        Segment(parent=0, start=1, length=n, episode=0),
    )
    share = EpisodeShare(
        episode="e", group=0, num_trainable=int(sampled.sum()), reward=reward, truncated=truncated, continued_by=(-1,)
    )
    batch = TrainBatch(batch=0, micro_batches=(MicroBatch(columns=columns, segments=segments),), episodes=(share,))
    before = np.array([NAN, *np.where(sampled, values, NAN)], np.float32)
    behind = np.full(n + 1, NAN, np.float32)
    behind[-1] = after
    return batch, ScoredColumns(values=(before,), values_after=(behind,), policy_version=0)


def credited(batch, scores, config):
    columns = credit_from_values(batch, scores, config).micro_batches[0].columns
    return columns.credit[1:], columns.returns[1:]


def test_observations_are_no_steps():
    batch, scores = one_branch([1, 1, 0, 0, 1], [0.2, 0.3, 0.9, 0.9, 0.6], 1.0)
    credit, returns = credited(batch, scores, fixed(0.95))
    np.testing.assert_allclose(credit, [0.746, 0.68, NAN, NAN, 0.4], atol=1e-6)
    np.testing.assert_allclose(returns, [1, 1, NAN, NAN, 1], atol=1e-6)


def test_a_tool_token_neither_discounts_nor_resets_what_is_to_come():
    batch, scores = one_branch([1, 0, 1], [0.0, 0.0, 0.0], 1.0)
    _, returns = credited(batch, scores, gae(discount=0.5))
    np.testing.assert_allclose(returns, [0.5, NAN, 1.0])


@pytest.mark.parametrize(("alpha", "length", "decay"), [(0.05, 100, 0.8), (0.05, 1000, 0.98), (1.5, 100, 0.993333), (0.05, 19, 0.0), (0.05, 1, 0.0)])  # fmt: skip
def test_a_decay_of_length_is_what_was_worked_out_by_hand(alpha, length, decay):
    assert LengthDecay(alpha=alpha).of(length) == pytest.approx(decay, abs=1e-6)


def test_the_decay_of_length_counts_trained_tokens():
    batch, scores = one_branch([1, 0, 1, 1], [0.5, 9.0, 0.25, 0.0], 1.0)
    credit, _ = credited(batch, scores, GaeConfig(decay=LengthDecay(alpha=0.5)))
    third = 1 - 1 / 1.5
    np.testing.assert_allclose(credit[[3, 2]], [1.0, -0.25 + third], atol=1e-6)
    np.testing.assert_allclose(credit[0], -0.25 + third * (-0.25 + third), atol=1e-6)


def test_credit_and_target_have_a_decay_each():
    batch, scores = one_branch([1, 1], [0.2, 0.6], 1.0)
    credit, returns = credited(batch, scores, fixed(0.0, value_decay=0.5))
    np.testing.assert_allclose(credit, [0.4, 0.4], atol=1e-6)
    np.testing.assert_allclose(returns, [0.2 + 0.4 + 0.5 * 0.4, 1.0], atol=1e-6)


@pytest.mark.parametrize(
    ("reward", "truncated", "rule", "end"),
    [(1.0, False, "bootstrap", 1.0), (0.0, True, "bootstrap", 0.37), (0.0, False, "bootstrap", 0.0), (0.0, True, "reward", 0.0)],
    ids=["finished", "cut off", "finished without reward", "cut off, its reward taken"],
)  # fmt: skip
def test_what_was_cut_off_ends_in_the_value_of_its_last_state(reward, truncated, rule, end):
    batch, scores = one_branch([1, 1], [0.2, 0.6], reward, after=0.37, truncated=truncated)
    credit, returns = credited(batch, scores, gae(truncated=rule))
    np.testing.assert_allclose(returns, [end, end], atol=1e-6)
    np.testing.assert_allclose(credit, [end - 0.2, end - 0.6], atol=1e-6)


def test_the_value_behind_the_end_is_discounted_like_any_next_value():
    batch, scores = one_branch([1], [0.0], 0.0, after=0.5, truncated=True)
    np.testing.assert_allclose(credited(batch, scores, gae(discount=0.9))[1], [0.45], atol=1e-6)


def test_a_million_tokens_take_no_long_sums_with_them():
    values = np.random.default_rng(0).random(1_000_000)
    np.testing.assert_allclose(advantages(values, 1.0, 1.0, 1.0), 1.0 - values, atol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: msgspec.structs.replace(s, values=None), "holds? none: the trainer has no critic"),
        (lambda s: msgspec.structs.replace(s, values=(np.full(3, NAN, np.float32),)), "has no value"),
    ],
    ids=["no critic", "one value missing"],
)
def test_an_absent_value_is_refused_and_never_0(change, message):
    batch, scores = one_branch([1, 1], [0.2, 0.6], 1.0)
    with pytest.raises(ValueError, match=message):
        credit_from_values(batch, change(scores), GaeConfig())


def test_an_absent_last_state_is_refused_and_never_0():
    batch, scores = one_branch([1, 1], [0.2, 0.6], 0.0, truncated=True)
    with pytest.raises(ValueError, match="last state of episode e has no value"):
        credit_from_values(batch, scores, GaeConfig())


def test_an_absent_reward_is_refused_and_never_0():
    batch, scores = one_branch([1, 1], [0.2, 0.6], None)
    with pytest.raises(ValueError, match="without a reward"):
        credit_from_values(batch, scores, GaeConfig())


def test_a_punishment_of_length_and_a_value_in_place_of_the_reward_exclude_each_other():
    with pytest.raises(ValueError, match=r"credit.overlong.type=soft .* credit.truncated=bootstrap"):
        GaeConfig(overlong=SoftPunishment())
    GaeConfig(overlong=SoftPunishment(), truncated="reward")


# Across a compaction -------------------------------------------------------------------------------------------------


def compacted(lengths=(3, 2, 4), reward=1.0):
    """An episode whose context was compacted twice: every segment is a branch of its own that continues the one before."""
    build = Builder()
    turns = [
        msgspec.structs.replace(build.turn(i, -1, [3, i], [1] * length), continues=i - 1)
        for i, length in enumerate(lengths)
    ]
    return episode(turns, reward=reward)


def maker(config, limit=1000, max_branches=5):
    return BatchMaker(config, AdmissionConfig(max_branches=max_branches), PackingConfig(micro_batch_tokens=limit), 0)


def state_value(ids):
    """Of the state behind these tokens: any number that only they decide."""
    return math.sin(sum((i + 1) * (int(id) + 1) for i, id in enumerate(ids)))


def scores_of(batch, value=state_value):
    before, after = [], []
    for micro_batch in batch.micro_batches:
        columns = micro_batch.columns
        values = np.full((2, len(columns)), NAN, np.float32)
        for token in np.flatnonzero(columns.sampled):
            ids = columns.ids[path_tokens(micro_batch, token)]
            values[:, token] = value(ids[:-1]), value(ids)
        before.append(values[0])
        after.append(values[1])
    return ScoredColumns(values=tuple(before), values_after=tuple(after), policy_version=0)


def made(config, *episodes, limit=1000, max_branches=5, value=state_value):
    """Number, credit and return of each trained token, in the order of the numbers."""
    batches = maker(config, limit, max_branches)
    groups = {}
    for one in episodes:
        groups.setdefault(one.order.group, []).append(one)
    packed = batches.make(0, groups)[1].train_batch
    assert batches.question(packed) is None or batches.question(packed).wanted == ("values",)
    done = batches.credited(packed, scores_of(packed, value)) if packed.micro_batches else packed
    rows = []
    for micro_batch in done.micro_batches:
        columns = micro_batch.columns
        for token in np.flatnonzero(columns.trainable):
            number = round(-1024 * float(columns.logprobs[token])) - 1
            rows.append((number, float(columns.credit[token]), float(columns.returns[token])))
        assert np.isnan(columns.returns[~columns.trainable]).all()
    return np.array(sorted(rows)).reshape(-1, 3)


def test_credit_before_a_compaction_fades_by_the_tokens_behind_it():
    """Discount times decay is 0.9: factors .9**6, .9**4 and 1 on what each segment earns by itself."""
    rows = made(fixed(0.9, boundary="discount"), compacted(), value=lambda ids: 0.0)
    alone = [0.9 ** np.arange(length)[::-1] for length in (3, 2, 4)]
    expected = np.concatenate([alone[0] * 0.531441, alone[1] * 0.6561, alone[2]])
    np.testing.assert_allclose(rows[:, 1], expected, atol=1e-6)
    np.testing.assert_allclose(rows[:, 2], 1.0, atol=1e-6)


def test_a_bootstrap_walks_on_into_the_segment_that_follows():
    one = compacted()
    line = tokens_of(one, range(3))
    rows = made(fixed(0.9), one)
    expected = [written_out(line[i:], 1.0, 1.0, 0.9) for i in range(9)]
    np.testing.assert_allclose(rows[:, 1], expected, atol=1e-5)
    np.testing.assert_allclose(rows[:, 2], 1.0, atol=1e-6)


def test_without_discount_and_decay_both_boundaries_are_the_return_less_the_value():
    bootstrap, discount = (made(gae(boundary=b), compacted()) for b in ("bootstrap", "discount"))
    np.testing.assert_allclose(bootstrap, discount, atol=1e-6)


def test_a_branch_whose_continuation_was_not_admitted_ends_with_the_reward():
    one = compacted((3, 2))
    (admitted,) = admit_group(score_group(0, "t", [one], GaeConfig()), AdmissionConfig(max_branches=1), 0)
    assert continuations(admitted) == (-1,)
    rows = made(fixed(0.9), one, max_branches=1, value=lambda ids: 0.0)
    np.testing.assert_allclose(rows[:, 1], 0.9 ** np.arange(len(rows))[::-1], atol=1e-6)


def test_a_fork_that_leaves_a_turn_half_way_has_an_end_of_its_own():
    """The turn that it leaves has a successor already: both branches are attempts at the rest."""
    build = Builder()
    turns = [build.turn(0, -1, [3], [1]), build.turn(1, 0, [4], [1, 1])]
    fork = msgspec.structs.replace(build.turn(2, -1, [3, 9], [1]), continues=0)
    (admitted,) = admit_group(score_group(0, "t", [episode([*turns, fork])], GaeConfig()), AdmissionConfig(), 0)
    assert continuations(admitted) == (-1, -1)


# Episodes and turns --------------------------------------------------------------------------------------------------


def test_what_has_no_verdict_has_no_credit_and_one_episode_is_enough():
    build = Builder()
    alone = episode([build.turn(0, -1, [3], [1, 1])], reward=1.0)
    missing = episode([build.turn(0, -1, [3], [1])], reward=None, attempt=1)
    assert made(gae(), alone, missing)[:, 0].tolist() == [0, 1]
    group = score_group(0, "t", [missing], GaeConfig())
    assert group.credits == (None,) and group.discarded is None


def test_equal_rewards_teach_against_values():
    build = Builder()
    members = [episode([build.turn(0, -1, [3], [1])], reward=1.0, attempt=i) for i in range(2)]
    assert score_group(0, "t", members, GaeConfig()).discarded is None
    assert len(made(gae(), *members)) == 2


@pytest.mark.parametrize("reason", [Reason.CONTEXT_FULL, Reason.DONE])
def test_an_episode_that_a_length_limit_cut_off_is_bootstrapped(reason):
    build = Builder()
    last = FinishReason.STOP if reason is Reason.CONTEXT_FULL else FinishReason.LENGTH
    turn = msgspec.structs.replace(build.turn(0, -1, [3], [1, 1]), finish_reason=last)
    cut = msgspec.structs.replace(episode([turn], reward=0.0), reason=reason)
    rows = made(gae(), cut)
    np.testing.assert_allclose(rows[:, 2], state_value([3, 1, 1]), atol=1e-6)


@pytest.mark.parametrize("config", ["gae", "group_mean"])
def test_a_malformed_call_costs_its_own_turn_and_enters_no_target(config):
    def rows(penalty):
        build = Builder()
        turns = [build.turn(0, -1, [3], [1, 1]), build.turn(1, 0, [4], [1, 1]), build.turn(2, 1, [4], [1])]
        turns[1] = msgspec.structs.replace(turns[1], malformed=True)
        members = [episode(turns, reward=1.0), episode([build.turn(0, -1, [3], [1])], reward=0.0, attempt=1)]
        if config == "gae":
            return made(fixed(0.9, malformed_call=penalty), *members)
        credit = GroupMeanConfig(scale="none", malformed_call=penalty)
        packed = maker(credit).make(0, {0: members})[1].train_batch
        (micro_batch,) = packed.micro_batches
        columns = micro_batch.columns
        numbers = np.round(-1024 * columns.logprobs[columns.trainable]) - 1
        order = np.argsort(numbers)
        return np.stack([numbers, columns.credit[columns.trainable], columns.returns[columns.trainable]], 1)[order]

    plain, punished = rows(0.0), rows(0.25)
    np.testing.assert_allclose(plain[:, 1] - punished[:, 1], [0, 0, 0.25, 0.25, 0, 0], atol=1e-6)
    np.testing.assert_array_equal(plain[:, 2], punished[:, 2])


# However the batch is cut --------------------------------------------------------------------------------------------


@st.composite
def episodes(draw):
    build, found = Builder(), []
    ids = st.lists(st.integers(0, 1), min_size=1, max_size=3)
    for group in range(draw(st.integers(1, 2))):
        for attempt in range(draw(st.integers(1, 3))):
            turns = []
            for index in range(draw(st.integers(1, 5))):
                turn = build.turn(index, draw(st.integers(-1, index - 1)), draw(ids), draw(ids))
                turns.append(msgspec.structs.replace(turn, continues=draw(st.integers(-1, index - 1)), malformed=draw(st.booleans())))  # fmt: skip
            last = FinishReason.LENGTH if draw(st.booleans()) else FinishReason.STOP
            turns[-1] = msgspec.structs.replace(turns[-1], finish_reason=last)
            found.append(episode(turns, group=group, attempt=attempt, reward=draw(st.sampled_from([0.0, 1.0]))))
    return found


CONFIGS = [
    GaeConfig(decay=LengthDecay(alpha=0.4), discount=0.9, malformed_call=0.5),
    fixed(0.8, boundary="discount", value_decay=0.7),
    gae(truncated="reward"),
]


@settings(max_examples=60, deadline=None)
@given(episodes(), st.integers(1, 20), st.sampled_from(CONFIGS), st.integers(1, 5))
def test_credit_and_targets_do_not_depend_on_how_the_batch_is_cut(members, limit, config, max_branches):
    whole = made(config, *members, limit=10**6, max_branches=max_branches)
    cut = made(config, *members, limit=limit, max_branches=max_branches)
    np.testing.assert_array_equal(whole, cut)
    assert np.isfinite(whole).all()
    np.testing.assert_allclose(whole, by_hand(config, members, max_branches), atol=2e-5)


def by_hand(config, members, max_branches):
    """From the episodes alone, token by token, with sums written out."""
    rows = []
    for one in members:
        (admitted,) = admit_group(score_group(one.order.group, "t", [one], config), AdmissionConfig(max_branches=max_branches), 0)  # fmt: skip
        own, seen = [], set()
        for branch in admitted.branches:
            own.append([turn for turn in branch.path if turn not in seen])
            seen |= set(branch.path)
        follows = continuations(admitted)
        lines = [tokens_of(one, turns) for turns in own]
        for number, here in enumerate(lines):
            chain = [number, *reach(follows, number)]
            joined = config.boundary == "bootstrap"
            earlier = [n for n in range(len(own)) if number in reach(follows, n)]
            behind = [token for n in chain[1:] for token in lines[n]]
            num_behind, num_before = len(behind), sum(len(lines[n]) for n in earlier)
            line = [*here, *behind] if joined else here
            last = lines[chain[-1]][-1]
            cut = one.turns[-1].finish_reason is FinishReason.LENGTH and config.truncated == "bootstrap"
            end = config.discount * last["after"] if cut else one.reward
            decay = config.decay.of(num_before + len(line) if joined else len(here))
            for i, token in enumerate(here):
                credit = written_out(line[i:], end, config.discount, decay)
                credit *= 1.0 if joined else (config.discount * decay) ** num_behind
                target = token["before"] + written_out(line[i:], end, config.discount, config.value_decay)
                rows.append((token["number"], credit - config.malformed_call * token["malformed"], target))
    return np.array(sorted(rows))


def reach(follows, number):
    found = []
    while follows[number] >= 0:
        number = follows[number]
        found.append(number)
    return found


def tokens_of(one, turns):
    found = []
    for index in turns:
        path, at = [], index
        while at >= 0:
            path.insert(0, at)
            at = one.turns[at].parent
        ids = []
        for step in path:
            ids += one.turns[step].context.ids.tolist()
            ids += one.turns[step].sampled.ids.tolist() if step != index else []
        sampled = one.turns[index].sampled
        for i, id in enumerate(sampled.ids.tolist()):
            number = round(-1024 * float(sampled.logprobs[i])) - 1
            found.append({"number": number, "before": state_value(ids), "after": state_value([*ids, id]), "malformed": one.turns[index].malformed})  # fmt: skip
            ids.append(id)
    return found


def written_out(line, end, discount, decay):
    values = [token["before"] for token in line]
    deltas = [discount * b - a for a, b in itertools.pairwise(values)] + [end - values[-1]]
    return sum((discount * decay) ** i * delta for i, delta in enumerate(deltas))
