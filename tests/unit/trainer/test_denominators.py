"""The mean over a batch does not depend on how the batch is cut."""

import numpy as np
import pytest

from everlong.contracts.records import EpisodeShare
from everlong.trainer.denominators import denominator, token_weights


def shares(*counts):
    return tuple(EpisodeShare(episode=f"e{i}", group=0, num_trainable=n) for i, n in enumerate(counts))


def mean(micro_batches, episodes, reduction):
    """`micro_batches` are lists of (episode, loss); the sum over them, divided when the batch closes."""
    total = 0.0
    for terms in micro_batches:
        owners = np.array([owner for owner, _ in terms], np.int64)
        losses = np.array([loss for _, loss in terms], np.float64)
        total += float((token_weights(owners, episodes, reduction) * losses).sum())
    return total / denominator(episodes, reduction)


def test_token_and_sequence_mean_of_two_episodes():
    terms, episodes = [(0, 1.0)] * 2 + [(1, 2.0)] * 4, shares(2, 4)
    assert mean([terms], episodes, "token") == pytest.approx(1.6667, abs=1e-4)
    assert mean([terms], episodes, "sequence") == pytest.approx(1.5)


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
    assert mean(cut, shares(2, 1), "sequence") == pytest.approx(2.5)


def test_accumulated_loss_is_counted_over_the_window_of_the_step():
    window = [[(i, 1.0)] * 8 for i in range(2)]
    assert mean(window, shares(8, 8), "token") == pytest.approx(1.0)


def test_a_truncated_sample_leaves_numerator_and_denominator():
    assert mean([[(0, 1.0), (0, 1.0)]], shares(2, 0), "token") == 1.0
    assert mean([[(0, 1.0), (0, 1.0)]], shares(2, 0), "sequence") == 1.0


def test_branches_of_an_episode_are_never_averaged_apart():
    branches, other = [[(0, 1.0)] * 3, [(0, 3.0)]], [(1, 2.0)]
    assert mean([*branches, other], shares(4, 1), "sequence") == pytest.approx(1.75)
    assert mean([*branches, other], shares(4, 1), "token") == pytest.approx(1.6)


def test_a_thousand_ragged_rows_are_each_counted_once():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 5, 1032)
    terms = [(i, float(loss)) for i, n in enumerate(counts) for loss in rng.random(n)]
    cut = [terms[start : start + 512] for start in range(0, len(terms), 512)]
    expected = np.mean([loss for _, loss in terms])
    assert len(cut[-1]) not in (0, 512)
    assert mean(cut, shares(*map(int, counts)), "token") == pytest.approx(expected, rel=1e-12)
