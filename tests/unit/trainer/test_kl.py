"""KL estimates: their values, and the gradient that each has in expectation."""

import pytest
import torch

from everlong.trainer.losses.kl import kl_terms


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", 0.5), ("k2", 0.125), ("k3", 0.106531), ("unbiased", 0.130117)]
)
def test_values_of_one_token(estimator, expected):
    """log p = -1, log reference = -1.5, log q = -1.2."""
    assert kl_terms(float64(-1), float64(-1.5), float64(0.2), estimator).item() == pytest.approx(expected, abs=1e-6)


def test_k3_is_positive_on_both_sides():
    assert kl_terms(float64(-1), float64(-0.5), float64(0), "k3").item() == pytest.approx(0.148721, abs=1e-6)


LOGITS, REFERENCE, SAMPLER = float64(0.3, -0.2, 0.5), float64(0.0, 0.4, -0.1), float64(1.0, 0.2, -0.3)


def exact_gradient(reverse=False):
    """Of KL(p || reference), or of KL(reference || p), in the logits."""
    logits = LOGITS.clone().requires_grad_()
    log_p, log_r = logits.log_softmax(0), REFERENCE.log_softmax(0)
    kl = (log_r.exp() * (log_r - log_p)).sum() if reverse else (log_p.exp() * (log_p - log_r)).sum()
    return torch.autograd.grad(kl, logits)[0]


def expected_gradient(estimator, sampler=LOGITS):
    """Over samples of `sampler`, differentiated through the sample's logprob."""
    logits = LOGITS.clone().requires_grad_()
    log_p, log_q = logits.log_softmax(0), sampler.log_softmax(0)
    terms = kl_terms(log_p, REFERENCE.log_softmax(0), log_p - log_q, estimator)
    return torch.autograd.grad((log_q.exp() * terms).sum(), logits)[0]


def test_the_anchored_gradient_is_that_of_the_exact_divergence():
    assert exact_gradient().tolist() == pytest.approx([0.022440, -0.179420, 0.156980], abs=1e-6)
    assert expected_gradient("k3").tolist() == pytest.approx([0.059208, -0.224725, 0.165516], abs=1e-6)


def test_as_a_loss_each_estimator_has_the_gradient_it_says():
    torch.testing.assert_close(expected_gradient("k1"), float64(0, 0, 0))
    torch.testing.assert_close(expected_gradient("k2"), exact_gradient())
    torch.testing.assert_close(expected_gradient("k3"), exact_gradient(reverse=True))
    torch.testing.assert_close(expected_gradient("unbiased"), exact_gradient())


def test_only_the_unbiased_one_keeps_its_gradient_on_stale_samples():
    torch.testing.assert_close(expected_gradient("unbiased", SAMPLER), exact_gradient())
    assert (expected_gradient("k2", SAMPLER) - exact_gradient()).abs().max() > 0.01


def test_as_a_reward_k1_has_the_gradient_of_the_divergence_and_k3_almost_none():
    def gradient(estimator):
        logits = LOGITS.clone().requires_grad_()
        log_p = logits.log_softmax(0)
        cost = kl_terms(log_p, REFERENCE.log_softmax(0), log_p * 0, estimator).detach()
        return torch.autograd.grad((log_p.detach().exp() * cost * log_p).sum(), logits)[0]

    torch.testing.assert_close(gradient("k1"), exact_gradient())
    torch.testing.assert_close(gradient("k3"), exact_gradient() - exact_gradient(reverse=True))


def test_two_actions():
    """p = (.6, .4), reference = (.5, .5): in the logit of the first, k1 0, k2 the exact 0.097312, k3 0.1."""
    logit = float64(0.0).requires_grad_()
    log_p = torch.stack([float64(0.6).log()[0] + 0.4 * logit[0], float64(0.4).log()[0] - 0.6 * logit[0]])
    found = []
    for estimator in ("k1", "k2", "k3"):
        terms = kl_terms(log_p, float64(0.5, 0.5).log(), float64(0, 0), estimator)
        found.append(torch.autograd.grad((float64(0.6, 0.4) * terms).sum(), logit, retain_graph=True)[0].item())
    assert found == pytest.approx([0.0, 0.097312, 0.1], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3", "unbiased"])
def test_an_absurd_distance_stays_finite(estimator):
    log_p = torch.tensor([-300.0, -0.1], requires_grad=True)
    terms = kl_terms(log_p, torch.tensor([-0.1, -300.0]), torch.tensor([90.0, -90.0]), estimator)
    assert terms.isfinite().all() and torch.autograd.grad(terms.sum(), log_p)[0].isfinite().all()
