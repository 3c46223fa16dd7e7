"""Weights against the mismatch of engine and trainer, and what is measured before they are applied."""

import math

import numpy as np
import pytest
import torch

from everlong.trainer.branches import Branches
from everlong.trainer.config import (
    DoubleSidedMask,
    GrpoConfig,
    MisPo,
    NoCorrection,
    SequenceGeometric,
    SequenceProduct,
    TokenMask,
    TokenTruncation,
)
from everlong.trainer.corrections import correct, mismatch_by_engine, mismatch_metrics, off_policy
from everlong.trainer.losses import Tokens, surrogate

RHO = torch.tensor([0.4, 1.0, 1.8, 4.0, 6.0], dtype=torch.float64)
TOKENS_ONLY = MisPo(sequence_low=None, sequence_high=None)


def one_branch(length):
    return Branches(torch.zeros(length, dtype=torch.int64), 1)


def weights(rho, config):
    log_rho = torch.tensor(rho, dtype=torch.float64).log()
    return correct(log_rho, one_branch(len(rho)), config).weights_T.tolist()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(NoCorrection(), [1.0, 1.0, 1.0, 1.0, 1.0], id="none"),
        pytest.param(TokenTruncation(cap=2.0), [0.4, 1.0, 1.8, 2.0, 2.0], id="truncation"),
        pytest.param(TokenTruncation(cap=None), [0.4, 1.0, 1.8, 4.0, 6.0], id="weight without cap"),
        pytest.param(TokenMask(low=0.0, high=2.0), [0.4, 1.0, 1.8, 0.0, 0.0], id="mask above"),
        pytest.param(TokenMask(low=0.5, high=5.0), [0.0, 1.0, 1.8, 4.0, 0.0], id="mask on both sides"),
        pytest.param(DoubleSidedMask(low=0.2, high=4.0), [0.4, 1.0, 1.8, 0.0, 0.0], id="open bounds"),
        pytest.param(TOKENS_ONLY, [0.0, 1.0, 1.0, 0.0, 0.0], id="keep or reject"),
    ],
)
def test_weights_are_those_of_the_table(config, expected):
    assert weights(RHO.tolist(), config) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rho", "kept"),
    [([1.001, 0.999, 1.002, 1.0], True), ([0.9, 1.1, 1.0, 1.0], True), ([0.99] * 4, False)],
    ids=["1.000499", "0.997491", "0.99"],
)
def test_a_branch_is_kept_by_its_geometric_mean(rho, kept):
    assert weights(rho, MisPo()) == [float(kept)] * 4
    assert weights(rho, TOKENS_ONLY) == [1.0] * 4


def test_filters_are_apart_and_each_says_what_it_rejects():
    log_rho = torch.tensor([0.4, 1.0, 0.999, 1.0], dtype=torch.float64).log()
    branches = Branches(torch.tensor([0, 0, 1, 1]), 2)
    got = correct(log_rho, branches, MisPo())
    assert got.rejected["token"].tolist() == [True, False, False, False]
    assert got.rejected["sequence"].tolist() == [True, True, False, False]
    assert got.weights_T.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_product_and_geometric_mean_are_chosen_by_name():
    """8000 tokens that each differ by 3 in 10,000: nearly equal policies, and a product that has left."""
    log_rho = torch.full((8000,), -0.0003, dtype=torch.float64)
    branches = one_branch(8000)
    product = correct(log_rho, branches, SequenceProduct()).weights_T
    geometric = correct(log_rho, branches, SequenceGeometric()).weights_T
    token = correct(log_rho, branches, TokenTruncation()).weights_T
    assert [product[0].item(), geometric[0].item(), token[0].item()] == pytest.approx(
        [0.090718, 0.999700, 0.999700], abs=1e-6
    )
    metrics = mismatch_metrics(log_rho, branches)
    assert math.exp(metrics["mismatch/log_product"]) == pytest.approx(0.090718, abs=1e-6)
    assert metrics["mismatch/far_products"] == 1.0
    assert metrics["mismatch/max"] == pytest.approx(0.0003)


def test_a_branch_outside_is_truncated_or_masked():
    log_rho = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    branches = Branches(torch.tensor([0, 0, 1]), 2)
    cut = SequenceProduct(low=0.5, high=2.0)
    assert correct(log_rho, branches, cut).weights_T.tolist() == [2.0, 2.0, 0.5]
    masked = cut.model_copy(update={"outside": "mask"})
    assert correct(log_rho, branches, masked).weights_T.tolist() == [0.0, 0.0, 0.0]
    geometric = SequenceGeometric(low=0.1, high=3.0)
    expected = [math.e, math.e, 1 / math.e]
    assert correct(log_rho, branches, geometric).weights_T.tolist() == pytest.approx(expected)


def test_off_policy_branches_with_negative_credit_are_dropped():
    """log(q/p) has mean 0.3 on the first branch, 0.1 on the second."""
    log_ratio = torch.tensor([-0.5, -0.1, -0.1, -0.1])
    branches = Branches(torch.tensor([0, 0, 1, 1]), 2)
    credit = torch.tensor([-1.0, 1.0, -1.0, -1.0])
    assert off_policy(log_ratio, credit, branches, 0.2).tolist() == [True, False, False, False]
    assert not off_policy(log_ratio, credit, branches, 0.31).any()
    assert off_policy(log_ratio, credit, branches, 0.0).tolist() == [True, False, True, True]


@pytest.mark.parametrize(
    "config", [TokenTruncation(cap=None), TokenMask(), MisPo(), SequenceProduct(), SequenceGeometric()], ids=lambda c: c.type
)  # fmt: skip
def test_weights_carry_no_gradient_and_stay_finite(config):
    log_mismatch = torch.tensor([800.0, -800.0, 0.0], requires_grad=True)
    got = correct(log_mismatch, one_branch(3), config).weights_T
    assert not got.requires_grad
    assert got.isfinite().all()


def test_decoupled_objective_is_weight_times_clipped_ratio():
    q, p0, p = -1.0, -0.8, -0.5
    logprob = torch.tensor([p], dtype=torch.float64, requires_grad=True)
    log_mismatch = torch.tensor([p0 - q], dtype=torch.float64)
    weight = correct(log_mismatch, one_branch(1), TokenTruncation(cap=None)).weights_T
    tokens = Tokens(logprob, logprob - p0, torch.ones(1, dtype=torch.float64))
    objective = -(weight * surrogate(tokens, GrpoConfig(clip_low=0.2, clip_high=0.2)).loss_T).sum()
    (gradient,) = torch.autograd.grad(objective, logprob)
    assert weight.item() == pytest.approx(1.221403, abs=1e-6)
    assert tokens.log_ratio_T.exp().item() == pytest.approx(1.349859, abs=1e-6)
    assert objective.item() == pytest.approx(1.465683, abs=1e-6)
    assert gradient.item() == 0.0


def test_behaviour_base_shows_staleness_in_the_ratio():
    log_ratio = torch.tensor([-0.5 - -1.0], dtype=torch.float64)
    tokens = Tokens(log_ratio, log_ratio, torch.ones(1, dtype=torch.float64))
    terms = surrogate(tokens, GrpoConfig(clip_low=0.2, clip_high=0.2))
    assert log_ratio.exp().item() == pytest.approx(1.648721, abs=1e-6)
    assert -terms.loss_T.item() == pytest.approx(1.2)
    assert terms.gate_T.item() == 0.0


def test_mismatch_is_measured_raw():
    metrics = mismatch_metrics(torch.tensor([math.log(6.0), 0.0, math.log(0.5)]), Branches(torch.tensor([0, 0, 1]), 2))
    assert metrics["mismatch/max"] == pytest.approx(1.791759, abs=1e-6)
    assert metrics["mismatch/mean"] == pytest.approx((1.791759 + 0.693147) / 3, abs=1e-6)
    assert metrics["mismatch/kl"] == pytest.approx((6 - 1 - 1.791759 + 0.5 - 1 + 0.693147) / 3, abs=1e-6)
    assert metrics["mismatch/chi2"] == pytest.approx((25 + 0.25) / 3, abs=1e-6)
    assert metrics["mismatch/effective_share"] == pytest.approx(7.5**2 / (3 * (36 + 1 + 0.25)), abs=1e-6)
    assert metrics["mismatch/log_product"] == pytest.approx(1.791759, abs=1e-6)


def test_engine_and_trainer_in_agreement_measure_zero():
    assert mismatch_metrics(torch.zeros(4), one_branch(4)) == {
        "mismatch/max": 0.0,
        "mismatch/mean": 0.0,
        "mismatch/kl": 0.0,
        "mismatch/chi2": 0.0,
        "mismatch/effective_share": 1.0,
        "mismatch/log_product": 0.0,
        "mismatch/far_products": 0.0,
    }


def test_mismatch_is_summed_for_each_engine_and_age_and_for_nobody_who_is_not_named():
    mismatch = torch.tensor([0.1, -0.3, 0.2, -0.5, 0.7, 9.0], dtype=torch.float64)
    engines = np.array([0, 0, 1, 1, 1, -1], np.int16)
    ages = np.array([0, 0, 0, 2, 2, 0], np.int32)
    found = mismatch_by_engine(mismatch, engines, ages)
    assert [(part.engine, part.age, part.num_tokens) for part in found] == [(0, 0, 2), (1, 0, 1), (1, 2, 2)]
    assert [part.total for part in found] == pytest.approx([0.4, 0.2, 1.2])
    assert mismatch_by_engine(mismatch, np.full(6, -1, np.int16), ages) == ()
