"""The whole objective per token against a reference in plain numpy, float64, one token and one branch at a time."""

import math

import numpy as np
import pytest
import torch

from everlong.trainer.branches import Branches
from everlong.trainer.config import (
    CispoConfig,
    DapoConfig,
    DoubleSidedMask,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    GspoTokenConfig,
    KimiConfig,
    KlLoss,
    KlReward,
    MisPo,
    NoCorrection,
    RatioConfig,
    ReinforceConfig,
    SapoConfig,
    SequenceGeometric,
    SequenceProduct,
    TokenMask,
    TokenTruncation,
)
from everlong.trainer.kl_config import WITHOUT_KL
from everlong.trainer.objective import Objective, PolicyTokens, Reference, policy_terms
from everlong.trainer.tally import Tally

BRANCHES = [0, 0, 1, 0, 2, 1, 1, 2, 3, 0, 2, 1]
WIDE = {"clip_low": 0.15, "clip_high": 0.15}


def some_tokens(seed):
    """Logprobs now, before the first update, at sampling and of a reference; credit, one number per branch."""
    rng = np.random.default_rng(seed)
    now = -rng.random(len(BRANCHES)) * 3 - 0.5
    before, sampled, reference = (now + rng.normal(0, scale, len(now)) for scale in (0.2, 0.5, 0.8))
    credit = np.array([0.7, -1.2, -0.4, 1.5])[BRANCHES]
    return now, before, sampled, reference, credit


# The reference -------------------------------------------------------------------------------------------------------


def members(t):
    return [u for u in range(len(BRANCHES)) if BRANCHES[u] == BRANCHES[t]]


def slope_clipped(ratio, credit, low, high, dual=math.inf):
    """Value of the surrogate and its derivative in the logarithm of the ratio."""
    value = min(ratio * credit, min(max(ratio, 1 - low), 1 + high) * credit)
    active = ratio * credit <= min(max(ratio, 1 - low), 1 + high) * credit
    if credit < 0 and value < dual * credit:
        value, active = dual * credit, False
    return value, ratio * credit if active else 0.0


def surrogate_of(loss, ratio, credit, logprob):
    """Value, derivative in the log ratio, and derivative in the token's own logprob apart from the ratio."""
    match loss:
        case ReinforceConfig():
            return credit * logprob, 0.0, credit
        case CispoConfig():
            weight = min(max(ratio, loss.ratio_min), loss.ratio_max)
            return weight * credit * logprob, 0.0, weight * credit
        case SapoConfig():
            tau = loss.tau_positive if credit > 0 else loss.tau_negative
            sigma = 1 / (1 + math.exp(-tau * (ratio - 1)))
            return 4 / tau * sigma * credit, 4 * sigma * (1 - sigma) * credit * ratio, 0.0
        case KimiConfig():
            inside = loss.ratio_min <= ratio <= loss.ratio_max
            value = min(max(ratio, loss.ratio_min), loss.ratio_max) * credit - loss.pull * math.log(ratio) ** 2
            return value, (ratio * credit if inside else 0.0) - 2 * loss.pull * math.log(ratio), 0.0
    dual = getattr(loss, "dual_clip", None) or math.inf
    return (*slope_clipped(ratio, credit, loss.clip_low, loss.clip_high, dual), 0.0)


def weight_of(t, log_rho, correction):
    rho = math.exp(log_rho[t])
    geometric = math.exp(np.mean([log_rho[u] for u in members(t)]))
    product = math.exp(math.fsum(log_rho[u] for u in members(t)))
    match correction:
        case NoCorrection():
            return 1.0
        case TokenTruncation():
            return min(rho, correction.cap)
        case TokenMask():
            return rho if correction.low <= rho <= correction.high else 0.0
        case DoubleSidedMask():
            return rho if correction.low < rho < correction.high else 0.0
        case MisPo():
            token = correction.token_low <= rho <= correction.token_high
            return float(token and correction.sequence_low <= geometric <= correction.sequence_high)
    value = product if isinstance(correction, SequenceProduct) else geometric
    if correction.outside == "truncate":
        return min(max(value, correction.low), correction.high)
    return value if correction.low <= value <= correction.high else 0.0


def estimate_of(estimator, now, reference, sampled):
    """Value and derivative in the logprob."""
    d = now - reference
    k3 = math.exp(-d) + d - 1
    return {
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (k3, 1 - math.exp(-d)),
        "unbiased": (math.exp(now - sampled) * k3, math.exp(now - sampled) * (k3 + 1 - math.exp(-d))),
    }[estimator]


def expected(objective, now, before, sampled, reference, credit, weights):
    """Sum of weighted terms and its gradient in each token's logprob."""
    loss, ratio = objective.loss, objective.ratio
    log_ratio = now - (sampled if ratio.base == "behaviour" else before)
    numerator = now if loss.type == "reinforce" else before
    total, gradient = 0.0, np.zeros(len(now))
    for t in range(len(now)):
        level = getattr(loss, "level", "token")
        own = log_ratio[t] if level == "token" else np.mean([log_ratio[u] for u in members(t)])
        advantage = credit[t]
        if isinstance(objective.kl, KlReward):
            rest = [u for u in members(t) if u >= t]
            costs = [estimate_of(objective.kl.estimator, before[u], reference[u], sampled[u])[0] for u in rest]
            advantage -= objective.kl.coefficient * sum(costs)
        value, slope, direct = surrogate_of(loss, math.exp(own), advantage, now[t])
        weight = weight_of(t, numerator - sampled, ratio.correction)
        if ratio.off_policy_drop is not None and credit[t] < 0:
            distance = np.mean([sampled[u] - now[u] for u in members(t)])
            weight *= distance <= ratio.off_policy_drop
        total -= weights[t] * weight * value
        gradient[t] -= weights[t] * weight * direct
        for u in members(t) if level == "sequence" else [t]:
            gradient[u] -= weights[t] * weight * slope / (len(members(t)) if level == "sequence" else 1)
        if isinstance(objective.kl, KlLoss):
            nats, change = estimate_of(objective.kl.estimator, now[t], reference[t], sampled[t])
            total += weights[t] * objective.kl.coefficient * nats
            gradient[t] += weights[t] * objective.kl.coefficient * change
    return total, gradient


def got(objective, now, before, sampled, reference, credit, weights):
    logprobs = torch.from_numpy(now).requires_grad_()
    before, sampled, reference, credit = map(torch.from_numpy, (before, sampled, reference, credit))
    tokens = PolicyTokens(
        logprobs_P=logprobs, proximal_P=before, behaviour_P=sampled, credit_P=credit,
        branches=Branches(torch.tensor(BRANCHES), 4),
        reference=Reference(own_P=logprobs, start_P=before, reference_P=reference),
    )  # fmt: skip
    total = (torch.from_numpy(weights) * policy_terms(tokens, objective, Tally())).sum()
    (gradient,) = torch.autograd.grad(total, logprobs)
    return total.item(), gradient.numpy()


LOSSES = [
    ReinforceConfig(),
    GrpoConfig(),
    GrpoConfig(level="sequence", **WIDE),
    GrpoConfig(level="sequence_token", **WIDE),
    DrGrpoConfig(),
    DapoConfig(),
    CispoConfig(ratio_min=0.7, ratio_max=1.4),
    CispoConfig(level="sequence", ratio_min=0.9, ratio_max=1.2),
    GspoConfig(**WIDE),
    GspoTokenConfig(**WIDE),
    SapoConfig(tau_positive=1.3, tau_negative=2.1),
    KimiConfig(pull=0.1, ratio_min=0.8, ratio_max=1.3),
]
CORRECTIONS = [
    NoCorrection(),
    TokenTruncation(cap=1.3),
    TokenMask(low=0.8, high=1.5),
    DoubleSidedMask(low=0.7, high=1.6),
    MisPo(token_low=0.7, token_high=1.8, sequence_low=0.8, sequence_high=1.2),
    SequenceProduct(high=1.5),
    SequenceProduct(low=0.6, high=1.9, outside="mask"),
    SequenceGeometric(low=0.9, high=1.1, outside="truncate"),
    SequenceGeometric(low=0.8, high=1.3),
]
KLS = [
    WITHOUT_KL,
    *(KlLoss(estimator=estimator, coefficient=0.3) for estimator in ("k2", "k3", "unbiased")),
    *(KlReward(estimator=estimator, coefficient=0.3) for estimator in ("k1", "k2", "k3")),
]


def assert_agree(objective):
    for seed in range(3):
        tokens = some_tokens(seed)
        weights = np.random.default_rng(seed).random(len(BRANCHES))
        value, gradient = got(objective, *tokens, weights)
        reference_value, reference_gradient = expected(objective, *tokens, weights)
        assert value == pytest.approx(reference_value, abs=1e-10)
        np.testing.assert_allclose(gradient, reference_gradient, atol=1e-10)
        assert objective.loss.type in ("gspo", "grpo", "gspo_token") or np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("base", ["behaviour", "proximal"])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.type} {getattr(loss, 'level', '')}".strip())
def test_value_and_gradient_of_every_loss_are_those_of_the_reference(loss, base):
    assert_agree(Objective(loss, RatioConfig(base=base)))


@pytest.mark.parametrize("drop", [None, 0.1], ids=["", "off policy"])
@pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda correction: correction.type)
@pytest.mark.parametrize("loss", [SapoConfig(), GspoConfig(**WIDE), ReinforceConfig()], ids=lambda loss: loss.type)
def test_every_correction_weighs_as_in_the_reference(loss, correction, drop):
    assert_agree(Objective(loss, RatioConfig(base="proximal", correction=correction, off_policy_drop=drop)))


@pytest.mark.parametrize("kl", KLS, ids=lambda kl: f"{kl.type} {getattr(kl, 'estimator', '')}")
def test_every_kl_term_pulls_as_in_the_reference(kl):
    for loss in (SapoConfig(), ReinforceConfig(), GspoTokenConfig(**WIDE)):
        assert_agree(Objective(loss, RatioConfig(), kl))


def test_a_rejected_token_has_no_gradient_whatever_its_ratio():
    """An infinite term times a weight of 0 would be NaN."""
    objective = Objective(CispoConfig(), RatioConfig(base="proximal", correction=TokenMask()))
    now, before, sampled, reference, credit = some_tokens(0)
    sampled[0] = -90.0
    _, gradient = got(objective, now, before, sampled, reference, credit, np.ones(len(now)))
    assert gradient[0] == 0.0
    assert np.isfinite(gradient).all()


def test_changing_the_level_of_the_correction_leaves_the_ratio():
    tokens = some_tokens(1)
    seen = []
    for correction in (TokenTruncation(), SequenceProduct(), SequenceGeometric()):
        tally = Tally()
        now, before, sampled, _, credit = map(torch.from_numpy, tokens)
        policy_terms(
            PolicyTokens(logprobs_P=now, proximal_P=before, behaviour_P=sampled, credit_P=credit, branches=Branches(torch.tensor(BRANCHES), 4)),
            Objective(GrpoConfig(), RatioConfig(base="proximal", correction=correction)), tally,
        )  # fmt: skip
        seen.append(tally.metrics()["ratio/mean"])
    assert seen[0] == seen[1] == seen[2] != 1.0


def test_each_token_of_a_branch_is_weighed_by_the_version_that_sampled_it():
    """Two tokens of one branch, the first of them three versions older: its own logprob is what its ratio is taken to."""
    logprobs = torch.tensor([-1.0, -1.0], dtype=torch.float64)
    sampled = torch.tensor([-1.0 - math.log(1.5), -1.0], dtype=torch.float64)
    tokens = PolicyTokens(
        logprobs_P=logprobs, proximal_P=logprobs, behaviour_P=sampled, credit_P=torch.ones(2, dtype=torch.float64),
        branches=Branches(torch.zeros(2, dtype=torch.int64), 1),
    )  # fmt: skip
    terms = policy_terms(tokens, Objective(GrpoConfig(clip_high=9.0), RatioConfig()), Tally())
    assert (-terms).tolist() == pytest.approx([1.5, 1.0])
