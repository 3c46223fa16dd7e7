"""The mean over a batch does not depend on how the batch is cut."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everlong.contracts.records import EpisodeShare
from everlong.trainer.denominators import TokenOwners, weigh


def shares(*counts, groups=None):
    groups = groups or [0] * len(counts)
    return tuple(
        EpisodeShare(episode=f"e{i}", group=group, num_trainable=n)
        for i, (n, group) in enumerate(zip(counts, groups, strict=True))
    )


def mean(micro_batches, episodes, reduction, constant_length=None):
    """`micro_batches` are lists of (episode, loss) or (episode, loss, branch); the sum over them, divided when the batch closes."""
    terms = [(*term, 0)[:3] for micro_batch in micro_batches for term in micro_batch]
    owners = TokenOwners(np.array([t[0] for t in terms], np.int64), np.array([t[2] for t in terms], np.int64))
    weights, denominator = weigh(owners, episodes, reduction, constant_length)
    ends = np.cumsum([0, *map(len, micro_batches)])
    total = 0.0
    for start, stop in pairwise(ends):
        total += float(sum(float(w) * t[1] for w, t in zip(weights[start:stop], terms[start:stop], strict=True)))
    return total / denominator


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("token", 10 / 6), ("sequence", 1.5), ("episode", 1.5), ("group", 10 / 6), ("constant", 0.625)],
)
def test_means_of_two_episodes(reduction, expected):
    terms, episodes = [(0, 1.0)] * 2 + [(1, 2.0)] * 4, shares(2, 4)
    length = 8 if reduction == "constant" else None
    assert mean([terms], episodes, reduction, length) == pytest.approx(expected)


A, B = [(0, 1.0), (0, 1.0)], [(1, 4.0)]


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param([A + B], id="one micro-batch"),
        pytest.param([A, B], id="two"),
        pytest.param([B, A], id="the other order"),
        pytest.param([A, [], B], id="an empty one between"),
        pytest.param([A[:1], B, A[1:]], id="an episode cut in two"),
    ],
)
def test_the_mean_does_not_depend_on_the_cut(cut):
    assert mean(cut, shares(2, 1), "token") == pytest.approx(2.0)
    assert mean(cut, shares(2, 1), "episode") == pytest.approx(2.5)
    assert mean(cut, shares(2, 1), "sequence") == pytest.approx(2.5)
    assert mean(cut, shares(2, 1), "group") == pytest.approx(2.0)
    assert mean(cut, shares(2, 1), "constant", 4) == pytest.approx(0.75)


def test_a_mean_of_branch_means_is_no_mean_of_sums():
    """Ratio 1, credit 1 on one token and -1 on three: the objective is 0, and a token mean would show 0.5."""
    terms, episodes = [(0, -1.0)] + [(1, 1.0)] * 3, shares(1, 3)
    assert mean([terms], episodes, "sequence") == pytest.approx(0.0, abs=1e-6)
    assert mean([terms], episodes, "token") == pytest.approx(0.5)


def test_accumulated_loss_is_counted_over_the_window_of_the_step():
    window = [[(i, 1.0)] * 8 for i in range(2)]
    assert mean(window, shares(8, 8), "token") == pytest.approx(1.0)


@pytest.mark.parametrize("reduction", ["token", "sequence", "episode", "group"])
def test_a_truncated_sample_leaves_numerator_and_denominator(reduction):
    assert mean([[(0, 1.0), (0, 1.0)]], shares(2, 0, groups=[0, 1]), reduction) == 1.0


def test_branches_of_an_episode_may_count_once_or_each():
    branches, other = [[(0, 1.0, 0)] * 3, [(0, 3.0, 1)]], [(1, 2.0, 0)]
    assert mean([*branches, other], shares(4, 1), "episode") == pytest.approx(1.75)
    assert mean([*branches, other], shares(4, 1), "token") == pytest.approx(1.6)
    assert mean([*branches, other], shares(4, 1), "sequence") == pytest.approx(2.0)
    assert mean([*branches, other], shares(4, 1), "constant", 1) == pytest.approx(8 / 3)


def test_a_group_weighs_the_same_whatever_its_tokens():
    terms, episodes = [(0, 1.0)] * 2 + [(1, 2.0)] * 2 + [(2, 9.0)], shares(2, 2, 1, groups=[4, 4, 7])
    assert mean([terms], episodes, "group") == pytest.approx((1.5 + 9) / 2)


def test_nothing_to_train_has_no_denominator_and_no_error():
    weights, denominator = weigh(TokenOwners(np.zeros(0, np.int64), np.zeros(0, np.int64)), (), "sequence")
    assert (len(weights), denominator) == (0, 0)


def test_a_thousand_ragged_rows_are_each_counted_once():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 5, 1032)
    terms = [(i, float(loss)) for i, n in enumerate(counts) for loss in rng.random(n)]
    cut = [terms[start : start + 512] for start in range(0, len(terms), 512)]
    expected = np.mean([loss for _, loss in terms])
    assert len(cut[-1]) not in (0, 512)
    assert mean(cut, shares(*map(int, counts)), "token") == pytest.approx(expected, rel=1e-12)


def by_definition(terms, groups, reduction, length):
    """Means of means, unit by unit."""
    if reduction == "token":
        return np.mean([loss for _, loss, _ in terms])
    key = {
        "sequence": lambda t: (t[0], t[2]),
        "constant": lambda t: (t[0], t[2]),
        "episode": lambda t: t[0],
        "group": lambda t: groups[t[0]],
    }[reduction]
    units = {}
    for term in terms:
        units.setdefault(key(term), []).append(term[1])
    return np.mean([sum(losses) / (length if reduction == "constant" else len(losses)) for losses in units.values()])


@settings(max_examples=100, deadline=None)
@given(
    terms=st.lists(st.tuples(st.integers(0, 4), st.floats(-2, 2), st.integers(0, 2)), min_size=1, max_size=30),
    groups=st.lists(st.integers(0, 2), min_size=5, max_size=5),
    reduction=st.sampled_from(["token", "sequence", "episode", "group", "constant"]),
    cuts=st.lists(st.integers(0, 30), max_size=4),
)
def test_any_cut_has_the_mean_of_the_definition(terms, groups, reduction, cuts):
    length = 7 if reduction == "constant" else None
    counts = [sum(term[0] == episode for term in terms) for episode in range(5)]
    bounds = [0, *sorted(min(cut, len(terms)) for cut in cuts), len(terms)]
    cut = [terms[start:stop] for start, stop in pairwise(bounds)]
    got = mean(cut, shares(*counts, groups=groups), reduction, length)
    assert got == pytest.approx(by_definition(terms, groups, reduction, length), abs=1e-6)
