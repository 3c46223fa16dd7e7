"""Weights against the mismatch of engine and trainer, and what is measured before they are applied."""

import math

import pytest
import torch

from everlong.trainer.config import GrpoConfig, NoCorrection, TokenMask, TokenTruncation
from everlong.trainer.corrections import correction_weights, mismatch_metrics
from everlong.trainer.losses import surrogate

RHO = torch.tensor([0.4, 1.0, 1.8, 4.0, 6.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(NoCorrection(), [1.0, 1.0, 1.0, 1.0, 1.0], id="none"),
        pytest.param(TokenTruncation(cap=2.0), [0.4, 1.0, 1.8, 2.0, 2.0], id="truncation"),
        pytest.param(TokenMask(low=0.0, high=2.0), [0.4, 1.0, 1.8, 0.0, 0.0], id="mask above"),
        pytest.param(TokenMask(low=0.5, high=5.0), [0.0, 1.0, 1.8, 4.0, 0.0], id="mask on both sides"),
    ],
)
def test_weights_are_those_of_the_table(config, expected):
    torch.testing.assert_close(correction_weights(RHO.log(), config), torch.tensor(expected, dtype=torch.float64))


def test_weights_carry_no_gradient():
    log_mismatch = torch.zeros(2, requires_grad=True)
    assert not correction_weights(log_mismatch, TokenTruncation()).requires_grad


def test_decoupled_objective_is_weight_times_clipped_ratio():
    q, p0, p = -1.0, -0.8, -0.5
    log_ratio = torch.tensor([p - p0], dtype=torch.float64, requires_grad=True)
    weight = correction_weights(torch.tensor([p0 - q], dtype=torch.float64), TokenTruncation(cap=2.0))
    terms = surrogate(log_ratio, torch.ones(1, dtype=torch.float64), GrpoConfig(clip_low=0.2, clip_high=0.2))
    objective = -(weight * terms.loss_T).sum()
    (gradient,) = torch.autograd.grad(objective, log_ratio)
    assert weight.item() == pytest.approx(1.221403, abs=1e-6)
    assert log_ratio.exp().item() == pytest.approx(1.349859, abs=1e-6)
    assert objective.item() == pytest.approx(1.465683, abs=1e-6)
    assert gradient.item() == 0.0


def test_behaviour_base_shows_staleness_in_the_ratio():
    log_ratio = torch.tensor([-0.5 - -1.0], dtype=torch.float64)
    terms = surrogate(log_ratio, torch.ones(1, dtype=torch.float64), GrpoConfig(clip_low=0.2, clip_high=0.2))
    assert log_ratio.exp().item() == pytest.approx(1.648721, abs=1e-6)
    assert -terms.loss_T.item() == pytest.approx(1.2)
    assert terms.gate_T.item() == 0.0


def test_mismatch_is_measured_raw():
    metrics = mismatch_metrics(torch.tensor([math.log(6.0), 0.0, math.log(0.5)]))
    assert metrics["mismatch/max"] == pytest.approx(1.791759, abs=1e-6)
    assert metrics["mismatch/mean"] == pytest.approx((1.791759 + 0.693147) / 3, abs=1e-6)
    assert metrics["mismatch/kl"] == pytest.approx((6 - 1 - 1.791759 + 0.5 - 1 + 0.693147) / 3, abs=1e-6)
    assert metrics["mismatch/effective_share"] == pytest.approx(7.5**2 / (3 * (36 + 1 + 0.25)), abs=1e-6)


def test_engine_and_trainer_in_agreement_measure_zero():
    assert mismatch_metrics(torch.zeros(4)) == {
        "mismatch/max": 0.0,
        "mismatch/mean": 0.0,
        "mismatch/kl": 0.0,
        "mismatch/effective_share": 1.0,
    }
