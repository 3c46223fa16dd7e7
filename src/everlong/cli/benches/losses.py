"""Value and gradient of our losses against those of TRL's GRPO trainer, where it has the same: float64, random logprobs and credit.

`value` is the largest difference over all draws, of the loss and of its gradient in any token's logprob; `reference_value` is what
rounding may leave of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from everlong.cli.bench import Row
from everlong.cli.benches.peers.process import Peer
from everlong.contracts.records import EpisodeShare
from everlong.trainer.config import (
    AnyKl,
    AnyLoss,
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    KlLoss,
    NoKl,
    RatioConfig,
    SapoConfig,
)

if TYPE_CHECKING:
    from everlong.trainer.objective import Objective

ANSWERS, LONGEST, DRAWS = 8, 12, 20
ROUNDING = 1e-6
"""The weights of the means are float32, whatever the logprobs are."""
SMALLEST = 2.0**-60
"""Below the last digit of either: a difference of 0 has a ratio too."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    loss: AnyLoss
    theirs: dict[str, Any]
    kl: AnyKl = field(default_factory=NoKl)
    ratio: RatioConfig = field(default_factory=RatioConfig)


CLIP = {"epsilon_low": 0.2, "epsilon_high": 0.28}
GRPO = {"loss_type": "grpo", **CLIP}
UNBOUNDED = GrpoConfig(reduction="sequence", dual_clip=None)
CASES = (
    Case("grpo", UNBOUNDED, GRPO),
    Case("grpo, dual clip", GrpoConfig(reduction="sequence"), {**GRPO, "delta": 3.0}),
    Case("grpo, token mean", GrpoConfig(dual_clip=None), {"loss_type": "bnpo", **CLIP}),
    Case("grpo, off-policy drop", UNBOUNDED, {**GRPO, "off_policy_mask_threshold": 0.1}, NoKl(), RatioConfig(off_policy_drop=0.1)),
    Case("dapo", DapoConfig(), {"loss_type": "dapo", **CLIP}),
    Case(
        "dr_grpo", DrGrpoConfig(constant_length=LONGEST),
        {"loss_type": "dr_grpo", "epsilon_low": 0.2, "epsilon_high": 0.2, "max_completion_length": LONGEST},
    ),
    Case("cispo", CispoConfig(ratio_max=1.5), {"loss_type": "cispo", "epsilon_high": 1.5}),
    Case(
        "gspo", GspoConfig(clip_low=0.1, clip_high=0.15),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
    ),
    Case(
        "sapo", SapoConfig(reduction="sequence"),
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
    ),
    Case("kl k3", UNBOUNDED, {**GRPO, "beta": 0.04}, KlLoss(estimator="k3", coefficient=0.04)),
    Case(
        "kl unbiased", UNBOUNDED, {**GRPO, "beta": 0.04, "use_bias_correction_kl": True},
        KlLoss(estimator="unbiased", coefficient=0.04),
    ),
)  # fmt: skip


def measure() -> list[Row]:
    peer = Peer("losses", {}, threads=1)
    try:
        return [row for case in CASES for row in _rows(case, peer)]
    finally:
        peer.close()


def _rows(case: Case, peer: Peer) -> list[Row]:
    from everlong.trainer.objective import Objective

    objective, loss, gradient = Objective(case.loss, case.ratio, case.kl), 0.0, 0.0
    for seed in range(DRAWS):
        draw = _Draw.of(seed)
        ours = _loss_of(draw, objective)
        theirs = peer.ask({**draw.request(), "settings": case.theirs})
        loss = max(loss, abs(ours[0] - theirs["loss"]))
        gradient = max(gradient, float(np.abs(ours[1] - np.array(theirs["gradient"])[draw.mask_BT]).max()))
    return [_row(case.name, "loss", loss), _row(case.name, "gradient", gradient)]


def _row(case: str, metric: str, difference: float) -> Row:
    return Row(case, metric, "nats", difference, "trl, within", ROUNDING, ROUNDING / max(difference, SMALLEST))


@dataclass(frozen=True, slots=True)
class _Draw:
    """B answers of at most T tokens: logprobs now, at sampling and of a reference, and one credit for each answer."""

    logprobs_BT: np.ndarray
    behaviour_BT: np.ndarray
    reference_BT: np.ndarray
    credit_B: np.ndarray
    lengths_B: np.ndarray

    @staticmethod
    def of(seed: int) -> _Draw:
        rng = np.random.default_rng(seed)
        now = -0.5 - 3 * rng.random((ANSWERS, LONGEST))
        behaviour, reference = (now + rng.normal(0, scale, now.shape) for scale in (0.8, 0.8))
        return _Draw(now, behaviour, reference, rng.normal(size=ANSWERS), rng.integers(1, LONGEST + 1, ANSWERS))

    @property
    def mask_BT(self) -> np.ndarray:
        return np.arange(LONGEST) < self.lengths_B[:, None]

    def request(self) -> dict[str, Any]:
        streams = {"logprobs": self.logprobs_BT, "behaviour": self.behaviour_BT, "reference": self.reference_BT}
        of_answers = {"credit": self.credit_B, "lengths": self.lengths_B}
        return {name: values.tolist() for name, values in {**streams, **of_answers}.items()}


def _loss_of(draw: _Draw, objective: Objective) -> tuple[float, np.ndarray]:
    """Of the batch, and the gradient of each token that an answer has, row by row."""
    import torch

    from everlong.trainer.branches import Branches
    from everlong.trainer.denominators import TokenOwners, weigh
    from everlong.trainer.objective import PolicyTokens, Reference, policy_terms
    from everlong.trainer.tally import Tally

    mask_BT = draw.mask_BT
    now, behaviour, reference = (
        torch.from_numpy(values[mask_BT]) for values in (draw.logprobs_BT, draw.behaviour_BT, draw.reference_BT)
    )
    answer_T = np.repeat(np.arange(ANSWERS), draw.lengths_B)
    now.requires_grad_()
    tokens = PolicyTokens(
        logprobs_P=now, proximal_P=now.detach(), behaviour_P=behaviour, credit_P=torch.from_numpy(draw.credit_B[answer_T]),
        branches=Branches(torch.from_numpy(answer_T), ANSWERS),
        reference=Reference(own_P=now, start_P=now.detach(), reference_P=reference),
    )  # fmt: skip
    shares = [
        EpisodeShare(episode=str(b), group=0, num_trainable=int(length)) for b, length in enumerate(draw.lengths_B)
    ]
    owners = TokenOwners(answer_T, np.zeros_like(answer_T))
    weights_T, denominator = weigh(owners, shares, objective.loss.reduction, objective.loss.constant_length)
    terms_T = policy_terms(tokens, objective, Tally())
    loss = (torch.from_numpy(weights_T.astype(np.float64)) * terms_T).sum() / denominator
    (gradient_T,) = torch.autograd.grad(loss, now)
    return loss.item(), gradient_T.numpy()
