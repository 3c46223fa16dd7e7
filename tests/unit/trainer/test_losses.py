"""Losses against numbers worked out by hand."""

import math

import pytest
import torch

from everlong.trainer.branches import Branches
from everlong.trainer.config import (
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    GspoTokenConfig,
    KimiConfig,
    ReinforceConfig,
    SapoConfig,
)
from everlong.trainer.losses import Tokens, surrogate

ALL = [
    ReinforceConfig(),
    GrpoConfig(),
    GrpoConfig(dual_clip=None),
    DrGrpoConfig(),
    DapoConfig(),
    CispoConfig(),
    GspoConfig(),
    GspoTokenConfig(),
    SapoConfig(),
    KimiConfig(),
]


def name(config):
    return config.type


def tokens_of(log_ratio, credit):
    """The base is 0, so that the policy's logprob is the log ratio."""
    return Tokens(logprobs_T=log_ratio, log_ratio_T=log_ratio, credit_T=credit)


def objective(config, ratio, credit):
    """Value of the objective (the negative loss), its slope in the logprob, and the gate."""
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    terms = surrogate(tokens_of(log_ratio, torch.tensor([credit], dtype=torch.float64)), config)
    (slope,) = torch.autograd.grad(-terms.loss_T.sum(), log_ratio)
    return -terms.loss_T.item(), slope.item(), terms.gate_T.item()


SAPO = [
    (1.0, 0.5, 1.510163, 0.940015),
    (1.0, 1.0, 2.0, 1.0),
    (1.0, 1.5, 2.489837, 0.940015),
    (1.0, 2.0, 2.924234, 0.786448),
    (1.05, 0.5, 1.415938, 0.934140),
    (1.05, 1.0, 1.904762, 1.0),
    (1.05, 1.5, 2.393585, 0.934140),
    (1.05, 2.0, 2.822000, 0.768110),
]


@pytest.mark.parametrize(("tau", "ratio", "value", "slope"), SAPO)
def test_sapo_value_and_slope_are_those_of_the_paper(tau, ratio, value, slope):
    got = objective(SapoConfig(tau_positive=tau, tau_negative=7.0), ratio, 1.0)
    assert got == pytest.approx((value, slope * ratio, slope), abs=1e-6)


@pytest.mark.parametrize(("tau", "ratio", "value", "slope"), SAPO)
def test_sapo_takes_its_steepness_from_the_sign_of_the_credit(tau, ratio, value, slope):
    got = objective(SapoConfig(tau_positive=7.0, tau_negative=tau), ratio, -1.0)
    assert got == pytest.approx((-value, -slope * ratio, slope), abs=1e-6)


def test_sapo_without_credit_is_exactly_zero():
    value, slope, _ = objective(SapoConfig(), 1.5, 0.0)
    assert (value, slope) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("ratio", "credit", "clip_high", "dual", "value", "slope", "gate"),
    [
        pytest.param(1.25, 1.0, 0.2, 3.0, 1.2, 0.0, 0.0, id="above the upper bound"),
        pytest.param(1.25, 1.0, 0.28, 3.0, 1.25, 1.0, 1.0, id="a higher upper bound"),
        pytest.param(0.7, -1.0, 0.2, 3.0, -0.8, 0.0, 0.0, id="below the lower bound"),
        pytest.param(0.7, 1.0, 0.2, 3.0, 0.7, 1.0, 1.0, id="the lower bound binds negative credit only"),
        pytest.param(1.5, -1.0, 0.2, 3.0, -1.5, -1.0, 1.0, id="the upper bound binds positive credit only"),
        pytest.param(5.0, -1.0, 0.2, 3.0, -3.0, 0.0, 0.0, id="dual clip"),
        pytest.param(5.0, -1.0, 0.2, None, -5.0, -1.0, 1.0, id="no dual clip"),
    ],
)
def test_grpo_clips_where_it_says(ratio, credit, clip_high, dual, value, slope, gate):
    config = GrpoConfig(clip_low=0.2, clip_high=clip_high, dual_clip=dual)
    assert objective(config, ratio, credit) == pytest.approx((value, slope * ratio, gate), abs=1e-12)


@pytest.mark.parametrize("config", [DapoConfig(), DrGrpoConfig()], ids=name)
def test_dapo_and_dr_grpo_clip_like_grpo_without_its_dual_clip(config):
    same = GrpoConfig(clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=None)
    for ratio in (0.3, 0.79, 1.0, 1.25, 1.29, 5.0):
        for credit in (-1.0, 0.0, 2.0):
            assert objective(config, ratio, credit) == objective(same, ratio, credit)


def test_cispo_lets_a_clipped_token_teach_with_a_bounded_weight():
    config = CispoConfig(ratio_max=2.0)
    assert objective(config, 3.0, 1.0) == pytest.approx((2 * math.log(3), 2.0, 2 / 3))
    assert objective(config, 1.5, 1.0)[1] == pytest.approx(1.5)
    assert objective(config, 0.01, -1.0)[1] == pytest.approx(-0.01)
    assert objective(CispoConfig(ratio_min=0.5), 0.01, -1.0)[1] == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("ratio", "credit", "value", "slope"),
    [(1.1, 0.5, 0.549092, 0.530938), (3.0, 0.5, 0.879305, -0.219722), (3.0, -0.5, -1.120695, -0.219722)],
    ids=["inside", "outside, positive", "outside, negative"],
)
def test_kimi_clips_whatever_the_sign_and_pulls_back(ratio, credit, value, slope):
    got = objective(KimiConfig(ratio_min=0.5, ratio_max=2.0, pull=0.1), ratio, credit)
    assert got[:2] == pytest.approx((value, slope), abs=1e-6)


def test_reinforce_knows_no_ratio():
    assert objective(ReinforceConfig(), 3.0, 0.5) == pytest.approx((0.5 * math.log(3), 0.5, 1.0))


# Branches ------------------------------------------------------------------------------------------------------------


def at_level(level, log_ratio, index=None):
    index = [0] * len(log_ratio) if index is None else index
    log_ratio = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    branches = Branches(torch.tensor(index), max(index) + 1)
    return log_ratio, branches.at_level(log_ratio, level)


def test_a_branch_s_ratio_is_its_geometric_mean_and_each_token_has_its_part():
    log_ratio, branch_T = at_level("sequence", [0.01, -0.02, 0.03])
    (slope,) = torch.autograd.grad(branch_T.exp()[0], log_ratio)
    assert branch_T.exp().tolist() == pytest.approx([1.006689] * 3, abs=1e-6)
    assert slope.tolist() == pytest.approx([0.335563] * 3, abs=1e-6)


def test_gspo_clips_the_whole_branch():
    log_ratio, branch_T = at_level("sequence", [0.01, -0.02, 0.03])
    terms = surrogate(Tokens(log_ratio, branch_T, torch.ones(3, dtype=torch.float64)), GspoConfig())
    assert (-terms.loss_T).tolist() == pytest.approx([1.0004] * 3, abs=1e-12)
    assert torch.autograd.grad(terms.loss_T.sum(), log_ratio)[0].tolist() == [0.0] * 3


def test_both_kinds_of_gspo_have_one_gradient_where_the_credit_is_one_number():
    wide = {"clip_low": 0.5, "clip_high": 0.5}
    gradients = []
    for level, config in (("sequence", GspoConfig(**wide)), ("sequence_token", GspoTokenConfig(**wide))):
        log_ratio, branch_T = at_level(level, [0.01, -0.02, 0.03, 0.4], [0, 0, 0, 1])
        terms = surrogate(Tokens(log_ratio, branch_T, torch.full((4,), 0.7, dtype=torch.float64)), config)
        gradients.append(torch.autograd.grad(terms.loss_T.sum(), log_ratio)[0])
    torch.testing.assert_close(*gradients)
    assert gradients[0][:3].tolist() == pytest.approx([-0.7 * 1.0066889] * 3, abs=1e-6)


def test_only_trained_tokens_enter_a_branch_s_ratio():
    """A tool's token between them has no place in the index, so it cannot."""
    assert at_level("sequence", [0.2, 0.4])[1].exp()[0].item() == pytest.approx(1.349859, abs=1e-6)


def test_a_product_is_the_exponential_of_the_sum():
    branches = Branches(torch.zeros(3, dtype=torch.int64), 1)
    assert branches.sums(torch.tensor([0.1, -0.2, 0.3])).exp().item() == pytest.approx(1.221403, abs=1e-6)


def test_sums_to_the_end_stay_within_their_branch():
    branches = Branches(torch.tensor([0, 1, 0, 1, 1]), 2)
    assert branches.to_go(torch.tensor([1.0, 10.0, 2.0, 20.0, 30.0])).tolist() == [3.0, 60.0, 2.0, 50.0, 30.0]


def test_joined_branches_stay_apart():
    joined = Branches.join([Branches(torch.tensor([0, 1]), 2), Branches(torch.zeros(0, dtype=torch.int64), 0),
                            Branches(torch.tensor([0]), 1)])  # fmt: skip
    assert joined.sums(torch.tensor([1.0, 2.0, 4.0])).tolist() == [1.0, 2.0, 4.0]


# Every loss ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ALL, ids=name)
def test_an_absurd_ratio_stays_finite(config):
    log_ratio = torch.tensor([500.0, -500.0, 500.0, -500.0], requires_grad=True)
    terms = surrogate(tokens_of(log_ratio, torch.tensor([1.0, 1.0, -1.0, -1.0])), config)
    (gradient,) = torch.autograd.grad(terms.loss_T.sum(), log_ratio)
    assert terms.loss_T.isfinite().all() and gradient.isfinite().all()
    assert ((terms.gate_T >= 0) & (terms.gate_T <= 1)).all()


@pytest.mark.parametrize("config", ALL, ids=name)
def test_at_ratio_one_every_loss_has_the_gradient_of_policy_gradient(config):
    credit = torch.tensor([0.5, -2.0, 1.0])
    log_ratio = torch.zeros(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(surrogate(tokens_of(log_ratio, credit), config).loss_T.sum(), log_ratio)
    torch.testing.assert_close(gradient, -credit)


@pytest.mark.parametrize("config", ALL, ids=name)
def test_terms_are_per_token_and_independent(config):
    log_ratio, credit = torch.tensor([0.1, -0.3, 0.2]), torch.tensor([1.0, -1.0, 0.5])
    whole = surrogate(tokens_of(log_ratio, credit), config).loss_T
    alone = [surrogate(tokens_of(log_ratio[i : i + 1], credit[i : i + 1]), config).loss_T for i in range(3)]
    torch.testing.assert_close(whole, torch.cat(alone))


@pytest.mark.parametrize("config", ALL, ids=name)
def test_without_credit_no_loss_has_a_gradient_at_ratio_one(config):
    log_ratio = torch.zeros(3, requires_grad=True)
    terms = surrogate(tokens_of(log_ratio, torch.zeros(3)), config)
    assert torch.autograd.grad(terms.loss_T.sum(), log_ratio)[0].abs().max() == 0
