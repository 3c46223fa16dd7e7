"""A truncated episode that is masked leaves sum and denominator, and still counts as generated."""

import numpy as np
import pytest

from everlong.contracts.errors import Reason
from everlong.contracts.records import Episode, EpisodeOrder, FinishReason, Purpose, Turn, Verdict
from everlong.contracts.tokens import TokenColumns
from everlong.models.source import toy_config
from everlong.trainer.config import GrpoConfig, RatioConfig
from everlong.trainer.objective import Objective
from everlong.trainer.preparation import prepare_batch
from everlong.trajectories.admission import AdmissionConfig
from everlong.trajectories.credit import GroupMeanConfig, score_group
from everlong.trajectories.packing import PackingConfig, pack_batch


def episode(attempt: int, reward: float, num_tokens: int, finish: FinishReason) -> Episode:
    sampled = TokenColumns.sampled_tokens([7] * num_tokens, [-0.5] * num_tokens, version=0)
    turn = Turn(index=0, parent=-1, context=TokenColumns.context([1, 2]), sampled=sampled, finish_reason=finish)
    order = EpisodeOrder(task="t", group=0, attempt=attempt, purpose=Purpose.TRAIN)
    return Episode(order=order, reason=Reason.DONE, verdict=Verdict(reward=reward), turns=(turn,))


@pytest.mark.parametrize(("overlong", "counted"), [("mask", 2), ("train", 8)])
def test_a_loss_of_one_per_trained_token_has_mean_one_and_eight_tokens_were_generated(overlong: str, counted: int):
    members = [episode(0, 1.0, 2, FinishReason.STOP), episode(1, 0.0, 6, FinishReason.LENGTH)]
    group = score_group(0, "t", members, GroupMeanConfig(scale="none"))
    packed = pack_batch(0, [group], PackingConfig(), AdmissionConfig(overlong=overlong), seed=0)
    columns = [micro_batch.columns for micro_batch in packed.train_batch.micro_batches]
    total = sum(float(np.isfinite(c.credit[c.trainable]).sum()) for c in columns)
    prepared = prepare_batch(packed.train_batch, Objective(GrpoConfig(), RatioConfig()), toy_config())
    assert prepared.denominator == total == counted
    assert sum(o.trained + sum(o.discarded.values()) for o in packed.outcomes.values()) == 8
    assert group.baseline == 0.5, "its reward stays in the baseline"
