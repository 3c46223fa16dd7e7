"""On which branches a shared token counts."""

import pytest
from tests.unit.trainer.tiny import SHAPE

from everlong.contracts.records import EpisodeShare, MicroBatch, Segment, TrainBatch
from everlong.contracts.tokens import TokenColumns
from everlong.trainer.config import GspoConfig, RatioConfig, SapoConfig
from everlong.trainer.objective import Objective
from everlong.trainer.preparation import prepare_batch


def tree_of(*pieces):
    """A micro-batch of (parent, branch, columns), all of one episode."""
    segments, at = [], 0
    for parent, branch, columns in pieces:
        segments.append(Segment(parent=parent, start=at, length=len(columns), episode=0, branch=branch))
        at += len(columns)
    return MicroBatch(columns=TokenColumns.join([piece[2] for piece in pieces]), segments=tuple(segments))


def test_a_shared_token_trains_once_or_on_both_branches():
    """Sampled 2, 3; then branch A samples 4, branch B 5 and 6: five tokens, or seven."""

    def sampled(ids, logprob):
        return TokenColumns.sampled_tokens(ids, [logprob] * len(ids), version=0).with_credit(1.0)

    tree = tree_of(
        (-1, 0, TokenColumns.context([0, 1])),
        (0, 0, sampled([2, 3], -1.0)),
        (1, 0, sampled([4], -2.0)),
        (1, 1, sampled([5, 6], -3.0)),
    )
    share = EpisodeShare(episode="e", group=0, num_trainable=5)
    batch = TrainBatch(batch=0, micro_batches=(tree,), episodes=(share,))
    once = prepare_batch(batch, Objective(SapoConfig(), RatioConfig()), SHAPE)
    assert once.denominator == 5 and once.num_trained == 5
    summed = prepare_batch(batch, Objective(SapoConfig(), RatioConfig(), shared_prefix="sum_over_leaves"), SHAPE)
    assert summed.denominator == 7 and summed.num_trained == 5
    (micro_batch,) = summed.micro_batches
    ids = tree.columns.ids[micro_batch.rows.tokens[micro_batch.policy_P[micro_batch.on_branches.policy_F].numpy()]]
    assert ids.tolist() == [2, 3, 4, 2, 3, 5, 6]
    assert micro_batch.on_branches.branches.index_T.tolist() == [0, 0, 0, 1, 1, 1, 1]
    # of branch B's ratio all four are a part, of its gradient two
    (gspo,) = prepare_batch(batch, Objective(GspoConfig(), RatioConfig()), SHAPE).micro_batches
    assert gspo.on_branches.own_O.tolist() == [0, 1, 2, 5, 6]
    means = gspo.on_branches.branches.means(gspo.behaviour_P[gspo.on_branches.policy_F])
    assert means.tolist() == pytest.approx([-4 / 3, -2.0])
    assert gspo.on_branches.weights_O.tolist() == pytest.approx([1 / 3] * 3 + [1 / 2] * 2)
