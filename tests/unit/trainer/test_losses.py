"""Losses against numbers worked out by hand."""

import math

import pytest
import torch

from everlong.trainer.config import GrpoConfig, SapoConfig
from everlong.trainer.losses import surrogate
from everlong.trainer.losses.grpo import grpo
from everlong.trainer.losses.sapo import sapo


def objective(loss, ratio, credit, *args):
    """Value of the objective (the negative loss), its slope in the ratio, and the gate."""
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    terms = loss(log_ratio, torch.tensor([credit], dtype=torch.float64), *args)
    (slope,) = torch.autograd.grad(-terms.loss_T.sum(), log_ratio)
    return -terms.loss_T.item(), slope.item() / ratio, terms.gate_T.item()


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
    got = objective(sapo, ratio, 1.0, tau, 7.0)
    assert got == pytest.approx((value, slope, slope), abs=1e-6)


@pytest.mark.parametrize(("tau", "ratio", "value", "slope"), SAPO)
def test_sapo_takes_its_steepness_from_the_sign_of_the_credit(tau, ratio, value, slope):
    got = objective(sapo, ratio, -1.0, 7.0, tau)
    assert got == pytest.approx((-value, -slope, slope), abs=1e-6)


def test_sapo_without_credit_is_exactly_zero():
    value, slope, _ = objective(sapo, 1.5, 0.0, 1.0, 1.05)
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
    assert objective(grpo, ratio, credit, 0.2, clip_high, dual) == pytest.approx((value, slope, gate), abs=1e-12)


def test_grpo_equals_its_textbook_form():
    generator = torch.Generator().manual_seed(0)
    log_ratio, credit = torch.randn(2, 500, generator=generator, dtype=torch.float64)
    ratio = log_ratio.exp()
    textbook = torch.minimum(ratio * credit, ratio.clamp(0.8, 1.28) * credit)
    textbook = torch.where(credit < 0, torch.maximum(textbook, 3.0 * credit), textbook)
    torch.testing.assert_close(grpo(log_ratio, credit, 0.2, 0.28, 3.0).loss_T, -textbook)


@pytest.mark.parametrize(
    "config", [SapoConfig(), GrpoConfig(), GrpoConfig(dual_clip=None)], ids=["sapo", "grpo", "no dual"]
)
def test_an_absurd_ratio_stays_finite(config):
    log_ratio = torch.tensor([500.0, -500.0, 500.0, -500.0], requires_grad=True)
    terms = surrogate(log_ratio, torch.tensor([1.0, 1.0, -1.0, -1.0]), config)
    (gradient,) = torch.autograd.grad(terms.loss_T.sum(), log_ratio)
    assert terms.loss_T.isfinite().all() and gradient.isfinite().all()


def test_at_ratio_one_every_loss_has_the_gradient_of_policy_gradient():
    credit = torch.tensor([0.5, -2.0, 1.0])
    for config in (SapoConfig(), GrpoConfig()):
        log_ratio = torch.zeros(3, requires_grad=True)
        (gradient,) = torch.autograd.grad(surrogate(log_ratio, credit, config).loss_T.sum(), log_ratio)
        torch.testing.assert_close(gradient, -credit)


def test_terms_are_per_token_and_independent():
    log_ratio, credit = torch.tensor([0.1, -0.3, 0.2]), torch.tensor([1.0, -1.0, 0.5])
    for config in (SapoConfig(), GrpoConfig()):
        whole = surrogate(log_ratio, credit, config).loss_T
        alone = [surrogate(log_ratio[i : i + 1], credit[i : i + 1], config).loss_T for i in range(3)]
        torch.testing.assert_close(whole, torch.cat(alone))
