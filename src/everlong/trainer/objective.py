"""What is minimised: per trained token the corrected surrogate and the pull to the reference, or the supervised term.

Order, so that nothing is counted twice: rejection masks and importance weight (detached) -> update-ratio surrogate -> less what
the sampler expected of the weighted score -> KL.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from everlong.models.centring import Weigh
from everlong.models.projection import Projection
from everlong.trainer.branches import Branches
from everlong.trainer.corrections import correct, off_policy, token_weights
from everlong.trainer.kl_config import WITHOUT_KL, AnyKl, KlLoss, KlReward, NoKl
from everlong.trainer.loss_config import AnyLoss, Level, SharedPrefix, level_of
from everlong.trainer.losses import Tokens, surrogate
from everlong.trainer.losses.kl import kl_terms
from everlong.trainer.losses.terms import ratio_of
from everlong.trainer.ratio_config import RatioConfig
from everlong.trainer.tally import Tally

# P tokens of a micro-batch that the policy sampled, as its branches hold them; O of them train there


@dataclass(frozen=True, slots=True)
class Objective:
    loss: AnyLoss
    ratio: RatioConfig
    kl: AnyKl = WITHOUT_KL
    projection: Projection = field(default="none", kw_only=True)
    """Of the logit gradient of every trained token."""
    shared_prefix: SharedPrefix = field(default="once", kw_only=True)

    @property
    def level(self) -> Level:
        return level_of(self.loss)

    @property
    def of_branches(self) -> bool:
        """Whether a branch's tokens must be in one micro-batch."""
        return self.level != "token" or self.ratio.of_sequences or isinstance(self.kl, KlReward)

    @property
    def weigh(self) -> Weigh | None:
        """What an id weighs that the sampler might have sampled, where its expected score is wanted."""
        return partial(token_weights, config=self.ratio.correction) if self.ratio.score_centring else None

    @property
    def full_support(self) -> bool:
        return not isinstance(self.kl, NoKl) and self.kl.support == "full"


@dataclass(frozen=True, slots=True)
class Reference:
    """What the KL term compares, both over the support that `kl.support` names."""

    own_P: Tensor
    """Logprobs of the weights that are trained, with their gradient."""
    start_P: Tensor
    """Of the weights before the first update."""
    reference_P: Tensor


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """All that is known of P tokens."""

    logprobs_P: Tensor
    """Of the weights that are trained, with their gradient."""
    proximal_P: Tensor
    """Of the weights before the first update."""
    behaviour_P: Tensor
    credit_P: Tensor
    branches: Branches
    reference: Reference | None = None
    expected_P: Tensor | None = None
    """What the sampler expected of the weighted score, with its gradient; None where nobody asked."""
    own_O: Tensor | None = None
    """Which of them train; the others, which an earlier branch trains, are constants in what is measured of the whole branch.
    None: all train."""

    def own(self, values_P: Tensor) -> Tensor:
        """Those of the tokens that train, [O]."""
        return values_P if self.own_O is None else values_P[self.own_O]


def policy_terms(tokens: PolicyTokens, objective: Objective, tally: Tally) -> Tensor:
    """Un-normalised loss per token that trains, [O]."""
    own = tokens.own
    base_P = tokens.behaviour_P if objective.ratio.base == "behaviour" else tokens.proximal_P
    log_ratio_O = own(tokens.branches.at_level(tokens.logprobs_P - base_P, objective.level))
    credit_O = _credit(tokens, objective.kl, tally)
    terms = surrogate(Tokens(own(tokens.logprobs_P), log_ratio_O, credit_O), objective.loss)
    if objective.loss.type != "reinforce":
        ratio_O = ratio_of(log_ratio_O.detach())
        tally.mean("ratio/mean", ratio_O)
        tally.highest("ratio/max", ratio_O)
        tally.mean("ratio/gated", 1 - terms.gate_T)
    weights_O = _weights(tokens, objective, tally)
    loss_O = terms.loss_T if weights_O is None else torch.where(weights_O > 0, weights_O * terms.loss_T, 0.0)
    if tokens.expected_P is not None:
        # of a rejected token too: what is expected counts all that might have been sampled
        loss_O = loss_O + credit_O * own(tokens.expected_P)
    return loss_O + _kl_loss(tokens, objective.kl, tally)


def _weights(tokens: PolicyTokens, objective: Objective, tally: Tally) -> Tensor | None:
    """[O], detached, 0 where rejected; None where nothing is corrected."""
    ratio = objective.ratio
    if ratio.correction.type == "none" and ratio.off_policy_drop is None:
        return None
    own_P = tokens.logprobs_P.detach()
    numerator_P = own_P if objective.loss.type == "reinforce" else tokens.proximal_P
    correction = correct(numerator_P - tokens.behaviour_P, tokens.branches, ratio.correction)
    weights_P, rejected = correction.weights_T, dict(correction.rejected)
    if ratio.off_policy_drop is not None:
        log_ratio_P = own_P - tokens.behaviour_P
        rejected["off_policy"] = off_policy(log_ratio_P, tokens.credit_P, tokens.branches, ratio.off_policy_drop)
        weights_P = torch.where(rejected["off_policy"], 0.0, weights_P)
    weights_O = tokens.own(weights_P)
    tally.mean("correction/weight", weights_O)
    tally.mean("correction/rejected", (weights_O == 0).float())
    for name, outside_P in rejected.items():
        tally.mean(f"correction/rejected/{name}", tokens.own(outside_P).float())
    return weights_O


def _credit(tokens: PolicyTokens, kl: AnyKl, tally: Tally) -> Tensor:
    """[O]; lowered, where the KL is a reward, by what the rest of the branch costs."""
    if not isinstance(kl, KlReward):
        return tokens.own(tokens.credit_P)
    reference = tokens.reference
    assert reference is not None
    # the policy that is rewarded is that of the batch, whatever update this is
    cost_P = kl_terms(reference.start_P, reference.reference_P, torch.zeros_like(reference.start_P), kl.estimator)
    tally.mean("kl", tokens.own(cost_P))
    return tokens.own(tokens.credit_P - kl.coefficient * tokens.branches.to_go(cost_P))


def _kl_loss(tokens: PolicyTokens, kl: AnyKl, tally: Tally) -> Tensor | float:
    if not isinstance(kl, KlLoss):
        return 0.0
    reference = tokens.reference
    assert reference is not None
    to_sampler_P = tokens.logprobs_P - tokens.behaviour_P
    estimate_O = tokens.own(kl_terms(reference.own_P, reference.reference_P, to_sampler_P, kl.estimator))
    tally.mean("kl", estimate_O)
    return kl.coefficient * estimate_O
