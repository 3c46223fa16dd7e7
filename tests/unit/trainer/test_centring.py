"""Score centring in a batch: where the credit is constant, what the sampler expects moves the policy nowhere."""

import numpy as np
import pytest
import torch
from tests.unit.trainer.test_batch_gradient import PROMPT, batched, gradient_of, packed
from tests.unit.trainer.tiny import SHAPE, tiny

from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.trainer.config import (
    DoubleSidedMask,
    GrpoConfig,
    MisPo,
    NoCorrection,
    RatioConfig,
    ReinforceConfig,
    TokenMask,
    TokenTruncation,
    check_effective,
)
from everlong.trainer.kl_config import WITHOUT_KL
from everlong.trainer.objective import Objective
from everlong.trainer.preparation import prepare_batch

KEPT = [2, 5, 8]
SAMPLER = np.log(np.array([0.2, 0.7, 0.1], np.float32))


def answer(place, recorded=True):
    """One token drawn from the kept set; its share of the batch is the sampler's probability of it."""
    kept = KeptSets(ids=np.array(KEPT, np.int32), offsets=np.array([0, 3]), logprobs=SAMPLER if recorded else None)
    columns = TokenColumns.sampled_tokens([KEPT[place]], SAMPLER[[place]], version=0, kept=kept)
    return columns.with_credit(float(np.exp(SAMPLER[place])))


def every_answer(recorded=True):
    pieces = [(0, place, answer(place, recorded)) for place in range(3)]
    return batched(packed((-1, -1, PROMPT), *pieces), counts=(1, 1, 1))


def norm_of(ratio):
    step, _ = gradient_of(tiny(), every_answer(), ReinforceConfig(), ratio)
    return float(torch.cat([part.flatten() for part in step.gradient]).norm())


@pytest.mark.parametrize(
    "correction",
    [NoCorrection(), TokenTruncation(cap=1.05), TokenMask(low=0.5, high=1.5), DoubleSidedMask(low=0.5, high=1.5)],
    ids=lambda correction: correction.type,
)
def test_the_expected_gradient_is_nothing_whatever_the_weights(correction):
    drift = norm_of(RatioConfig(correction=correction))
    centred = norm_of(RatioConfig(correction=correction, score_centring=True))
    assert drift > 0.01 and centred < 1e-5 * max(drift, 1)


def test_kept_sets_without_the_sampler_s_logprobs_are_refused():
    objective = Objective(ReinforceConfig(), RatioConfig(score_centring=True))
    with pytest.raises(ValueError, match="micro-batch 0 has kept sets without the sampler's logprobs"):
        prepare_batch(every_answer(recorded=False), objective, SHAPE)


@pytest.mark.parametrize(
    ("loss", "ratio", "message"),
    [
        (GrpoConfig(), RatioConfig(score_centring=True), "loss grpo has a gate of its own"),
        (ReinforceConfig(), RatioConfig(score_centring=True, correction=MisPo()), "mis_po weighs whole branches"),
        (ReinforceConfig(), RatioConfig(score_centring=True, off_policy_drop=1.0), "off_policy_drop weighs whole branches"),
    ],
    ids=["a gate", "a branch's mean", "a branch's distance"],
)  # fmt: skip
def test_what_it_cannot_be_combined_with_is_refused(loss, ratio, message):
    with pytest.raises(ValueError, match=message):
        check_effective(loss, ratio, 1, WITHOUT_KL)
