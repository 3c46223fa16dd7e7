"""One gradient from one batch: prepared once, run micro-batch by micro-batch, summed by index, divided when it closes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everlong.contracts.records import EpisodeShare, MicroBatch, TrainBatch
from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.trainer.config import GrpoConfig, RatioConfig, SapoConfig
from everlong.trainer.corrections import correction_weights
from everlong.trainer.denominators import denominator, token_weights
from everlong.trainer.gradient_sum import Gradient, GradientSum
from everlong.trainer.losses import surrogate
from everlong.trainer.losses.terms import ratio_of
from everlong.trainer.replay import (
    Rows,
    check_micro_batch,
    episode_of_token,
    rows_of,
    trained_tokens,
)
from everlong.trainer.scoring import score_rows
from everlong.trainer.tally import Tally

# R trained rows of a micro-batch; P of them the policy sampled, S are supervised


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised."""

    loss: SapoConfig | GrpoConfig
    ratio: RatioConfig


@dataclass(frozen=True, slots=True)
class PreparedMicroBatch:
    micro_batch: MicroBatch
    rows: Rows
    weights_R: Tensor
    """Of the reduction."""
    policy_P: Tensor
    """Which rows the policy sampled; the others are imitated."""
    supervised_S: Tensor
    behaviour_P: Tensor
    """Logprobs at sampling."""
    credit_P: Tensor


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    micro_batches: tuple[PreparedMicroBatch, ...]
    denominator: int
    num_trained: int


@dataclass(frozen=True, slots=True)
class BatchGradient:
    loss: float
    gradient: Gradient
    logprobs: tuple[Tensor, ...]
    """Per micro-batch float32 [P], detached, of the weights that the gradient was taken at."""


def prepare_batch(batch: TrainBatch, loss: SapoConfig | GrpoConfig, model: LlamaConfig) -> PreparedBatch:
    """Raises ValueError for a batch whose records or counts do not hold together, before anything is computed."""
    counts = np.zeros(len(batch.episodes), np.int64)
    prepared = []
    for index, micro_batch in enumerate(batch.micro_batches):
        check_micro_batch(index, micro_batch, model)
        owners = episode_of_token(micro_batch.segments, len(micro_batch.columns))
        trained = trained_tokens(micro_batch.columns)
        rows = rows_of(micro_batch, trained)
        if len(rows) != trained.sum() or np.any(owners[rows.tokens] < 0):
            raise ValueError(
                f"micro-batch {index} trains the first token of a root, which nothing predicts, or a token of a shared "
                "prompt, which trains nowhere: give every episode a context before its first trainable token"
            )
        counts += np.bincount(owners[rows.tokens], minlength=len(counts))
        prepared.append(_prepare(micro_batch, rows, owners, batch.episodes, loss))
    for share, count in zip(batch.episodes, counts, strict=True):
        if share.num_trainable != count:
            raise ValueError(
                f"episode {share.episode} of batch {batch.batch} says {share.num_trainable} trainable tokens, its columns "
                f"hold {count} with mask and credit: the denominator would be wrong, count again when packing"
            )
    return PreparedBatch(tuple(prepared), denominator(batch.episodes, loss.reduction), int(counts.sum()))


def _prepare(
    micro_batch: MicroBatch,
    rows: Rows,
    owners: np.ndarray,
    episodes: Sequence[EpisodeShare],
    loss: SapoConfig | GrpoConfig,
) -> PreparedMicroBatch:
    columns, tokens = micro_batch.columns, rows.tokens
    sampled = columns.sampled[tokens]
    return PreparedMicroBatch(
        micro_batch=micro_batch,
        rows=rows,
        weights_R=torch.from_numpy(token_weights(owners[tokens], episodes, loss.reduction)),
        policy_P=torch.from_numpy(np.flatnonzero(sampled)),
        supervised_S=torch.from_numpy(np.flatnonzero(~sampled)),
        behaviour_P=torch.from_numpy(columns.logprobs[tokens][sampled]),
        credit_P=torch.from_numpy(columns.credit[tokens][sampled]),
    )


def batch_gradient(
    model: Llama,
    batch: PreparedBatch,
    objective: Objective,
    proximal: Sequence[Tensor] | None,
    head_chunk_tokens: int,
    tally: Tally,
) -> BatchGradient:
    """Loss and gradient of the batch at the model's weights.

    `proximal` are the logprobs before the first update; None on the first, whose own forward pass gives them: weights,
    packing and replay are the same, so the update ratio is exactly 1. Every micro-batch's gradient starts from zero.
    """
    parameters = list(model.parameters())
    gradients, loss, logprobs = GradientSum(), 0.0, []
    for index, prepared in enumerate(batch.micro_batches):
        if not len(prepared.rows):
            gradients.push(index, None)
            logprobs.append(torch.zeros(0))
            continue
        with tally.seconds("forward"):
            logprobs_R, entropy_R = score_rows(model, prepared.micro_batch, prepared.rows, head_chunk_tokens)
        own = logprobs_R.detach()[prepared.policy_P]
        base = own if proximal is None else proximal[index]
        terms_R = _terms(logprobs_R, base, prepared, objective, tally)
        total = (prepared.weights_R * terms_R).sum()
        with tally.seconds("backward"):
            parts = torch.autograd.grad(total, parameters, materialize_grads=True)
        gradients.push(index, [part.float() for part in parts])
        loss += float((prepared.weights_R.double() * terms_R.detach().double()).sum())
        logprobs.append(own)
        tally.mean("entropy", entropy_R[prepared.policy_P])
    gradient = gradients.close(len(batch.micro_batches))
    if gradient is None:
        raise ValueError("a batch without a trained token has no gradient")
    for part in gradient:
        part.div_(batch.denominator)
    return BatchGradient(loss / batch.denominator, gradient, tuple(logprobs))


def _terms(
    logprobs_R: Tensor, proximal_P: Tensor, prepared: PreparedMicroBatch, objective: Objective, tally: Tally
) -> Tensor:
    """Un-normalised loss per trained row: the corrected surrogate where the policy sampled, else -logprob."""
    terms_R = torch.zeros_like(logprobs_R).index_put((prepared.supervised_S,), -logprobs_R[prepared.supervised_S])
    tally.mean("loss/supervised", -logprobs_R[prepared.supervised_S])
    base_P = prepared.behaviour_P if objective.ratio.base == "behaviour" else proximal_P
    log_ratio_P = logprobs_R[prepared.policy_P] - base_P
    surrogate_P = surrogate(log_ratio_P, prepared.credit_P, objective.loss)
    ratio_P = ratio_of(log_ratio_P.detach())
    tally.mean("ratio/mean", ratio_P)
    tally.highest("ratio/max", ratio_P)
    tally.mean("ratio/gated", 1 - surrogate_P.gate_T)
    loss_P = surrogate_P.loss_T
    if objective.ratio.correction.type != "none":
        weights_P = correction_weights(proximal_P - prepared.behaviour_P, objective.ratio.correction)
        tally.mean("correction/weight", weights_P)
        tally.mean("correction/rejected", (weights_P == 0).float())
        loss_P = torch.where(weights_P > 0, weights_P * loss_P, 0.0)
    return terms_R.index_put((prepared.policy_P,), loss_P)


@contextmanager
def deterministic() -> Generator[None]:
    """Within, torch sums in a fixed order: on a CPU with threads, gradients of gathered keys would else add up in any."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
