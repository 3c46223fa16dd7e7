"""Settings of the trainer: which loss, against which base, corrected how, stepped how. Importing it loads no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from everlong.contracts.config import Config
from everlong.trainer.clamp_config import WITHOUT_CLAMP, ClampConfig
from everlong.trainer.critic_config import BoundedHead, CriticConfig, LinearHead
from everlong.trainer.kl_config import AnyKl, KlConfig, KlLoss, KlReward, NoKl
from everlong.trainer.loss_config import (
    AnyLoss,
    CispoConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    GspoTokenConfig,
    KimiConfig,
    LossConfig,
    PpoConfig,
    Reduction,
    ReinforceConfig,
    SapoConfig,
    SharedPrefix,
    level_of,
)
from everlong.trainer.optimizer_config import AdamWConfig, AnyOptimizer, MuonConfig, OptimizerConfig
from everlong.trainer.ratio_config import (
    AnyCorrection,
    CorrectionConfig,
    DoubleSidedMask,
    MisPo,
    NoCorrection,
    RatioConfig,
    SequenceGeometric,
    SequenceProduct,
    TokenMask,
    TokenTruncation,
)
from everlong.trainer.replay_config import ReplayConfig, check_replay, check_routers

__all__ = [
    "AdamWConfig",
    "AnyCorrection",
    "AnyKl",
    "AnyLoss",
    "AnyOptimizer",
    "BoundedHead",
    "CispoConfig",
    "CorrectionConfig",
    "CriticConfig",
    "DapoConfig",
    "DoubleSidedMask",
    "DrGrpoConfig",
    "GrpoConfig",
    "GspoConfig",
    "GspoTokenConfig",
    "KimiConfig",
    "KlConfig",
    "KlLoss",
    "KlReward",
    "LinearHead",
    "LossConfig",
    "MisPo",
    "MuonConfig",
    "NoCorrection",
    "NoKl",
    "OptimizerConfig",
    "PpoConfig",
    "RatioConfig",
    "Reduction",
    "ReinforceConfig",
    "ReplayConfig",
    "SapoConfig",
    "SequenceGeometric",
    "SequenceProduct",
    "TokenMask",
    "TokenTruncation",
    "TrainerConfig",
    "check_effective",
    "check_projection",
    "check_replay",
    "check_routers",
    "ignores_staleness",
    "level_of",
]


class TrainerConfig(Config):
    updates_per_batch: int = Field(1, ge=1)
    """Optimiser steps over the same batch."""
    shared_prefix: SharedPrefix = "once"
    """What a token counts that several branches of an episode share. once: it trains on the branch that first holds it, and is a
    constant in the ratios of the others (arXiv:2609.33848). sum_over_leaves: it trains on each of them, as if every branch were
    a row of its own (arXiv:2511.00413)."""
    head_chunk_tokens: int = Field(128, ge=1)
    """Rows of logits that exist at a time; fewer need less memory."""
    logit_projection: Literal["none", "mean", "exact_target"] = "none"
    """What rounding leaves of the sum of a row's logit gradient, which is 0 in exact arithmetic, is taken out of it: spread over the
    ids that can be sampled (mean, arXiv:2605.06152), or put where it is lost, at the label (exact_target). The head's backward
    then multiplies in float32."""
    checkpoint_keep: int = Field(2, ge=1)
    """Newest checkpoints that stay in the store."""
    gradient_clamp: ClampConfig = WITHOUT_CLAMP
    """Whether the largest gradients are cut, in the backward pass or after it."""
    ranks: int = Field(1, ge=1)
    """Processes that share out the micro-batches and the optimiser's state of a batch, on this machine. It changes no update."""


def check_projection(trainer: TrainerConfig, ratio: RatioConfig) -> None:
    """Raises ValueError where a part of the logit gradient would not be projected."""
    if trainer.logit_projection != "none" and ratio.score_centring:
        raise ValueError(
            f"trainer.logit_projection={trainer.logit_projection} acts on the gradient of each token's logprob, and "
            "ratio.score_centring adds another to the same logits: set trainer.logit_projection to none, or "
            "ratio.score_centring to false"
        )


def check_effective(loss: AnyLoss, ratio: RatioConfig, updates_per_batch: int, kl: AnyKl) -> None:
    """Raises ValueError for settings under which something could not change the gradient, or would count twice."""
    correction = ratio.correction.type
    if isinstance(kl, KlReward) and level_of(loss) == "sequence":
        raise ValueError(
            f"kl.type=reward gives each token a credit of its own, and loss {loss.type} has one ratio and one credit per branch: "
            "take loss gspo_token or loss.level=sequence_token, or set kl.type to loss"
        )
    _check_centring(loss, ratio)
    if loss.type == "reinforce":
        if ratio.base == "proximal":
            raise ValueError(
                "ratio.base=proximal has no effect with loss reinforce, which takes no ratio: set ratio.base to behaviour, "
                "where ratio.correction weighs p/q"
            )
        return
    if correction == "double_sided":
        raise ValueError(
            f"ratio.correction double_sided weighs the current p/q, which loss {loss.type} holds in its own ratio: it would "
            "count twice. Set loss.type to reinforce, or the correction to token_mask"
        )
    if ratio.base == "behaviour" and correction != "none":
        raise ValueError(
            f"ratio.base=behaviour already holds the mismatch that correction {correction} weighs: with loss {loss.type} it "
            "would count twice. Set ratio.correction.type to none, ratio.base to proximal, or loss.type to reinforce"
        )
    if ratio.base == "proximal" and updates_per_batch == 1:
        raise ValueError(
            f"loss {loss.type} has no effect with ratio.base=proximal and trainer.updates_per_batch=1: the update ratio is "
            "exactly 1, so every loss has the gradient of plain policy gradient. Set ratio.base to behaviour, or "
            "trainer.updates_per_batch to 2 or more, or loss.type to reinforce"
        )


def _check_centring(loss: AnyLoss, ratio: RatioConfig) -> None:
    if not ratio.score_centring:
        return
    if loss.type != "reinforce":
        raise ValueError(
            f"ratio.score_centring centres the score of plain policy gradient, and loss {loss.type} has a gate of its own: set "
            "loss.type to reinforce, or ratio.score_centring to false"
        )
    if ratio.of_sequences:
        cause = ratio.correction.type if ratio.off_policy_drop is None else "off_policy_drop"
        raise ValueError(
            f"ratio.score_centring needs the weight that each kept id would have had, and {cause} weighs whole branches: take "
            "ratio.correction token_truncation, token_mask or double_sided, and leave ratio.off_policy_drop out"
        )


def ignores_staleness(loss: AnyLoss, ratio: RatioConfig) -> str | None:
    """Why tokens of an older policy version would train as if they were of the current one; None where they do not."""
    if ratio.correction.type != "none":
        return None
    if loss.type == "reinforce":
        return "loss.type=reinforce with ratio.correction.type=none weighs no token by the policy that sampled it"
    if ratio.base == "proximal":
        return "ratio.base=proximal with ratio.correction.type=none takes the trainer's own logprobs for the sampler's"
    return None
