"""One gradient from one batch: run micro-batch by micro-batch, summed by index, divided when it closes."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from everlong.contracts.records import MicroBatch
from everlong.models.decisions import TokenRecorder
from everlong.models.llama.model import Llama
from everlong.models.numerics import widened
from everlong.models.tree_pass import read_states
from everlong.trainer.gradient_sum import Gradient, GradientSum
from everlong.trainer.objective import Objective, PolicyTokens, Reference, policy_terms
from everlong.trainer.preparation import PreparedBatch, PreparedMicroBatch
from everlong.trainer.ranks.ranks import ALONE, OwnedGradient, Ranks
from everlong.trainer.scoring import RowScores, score_rows
from everlong.trainer.tally import Tally

# R trained rows of a micro-batch, P of them the policy sampled; S are imitated, O trained, each on every branch on which it counts


@dataclass(frozen=True, slots=True)
class Start:
    """Logprobs of one micro-batch before the first update, float32 [P], detached."""

    proximal_P: Tensor
    full_P: Tensor
    """Over the whole vocabulary where the objective asks for it; else the same."""


@dataclass(frozen=True, slots=True)
class BatchGradient:
    loss: float
    gradient: OwnedGradient
    starts: tuple[Start, ...]
    """Per micro-batch, of the weights that the gradient was taken at."""


NOTHING = Start(torch.zeros(0), torch.zeros(0))


@dataclass(frozen=True, slots=True)
class _Computed:
    """What a micro-batch gives beside its gradient."""

    loss: float
    start: Start
    tally: Tally


def batch_gradient(
    model: Llama,
    batch: PreparedBatch,
    objective: Objective,
    starts: Sequence[Start] | None,
    head_chunk_tokens: int,
    tally: Tally,
    reference: Sequence[Tensor] | None = None,
    *,
    ranks: Ranks = ALONE,
    owners: Sequence[int] = (),
) -> BatchGradient:
    """Loss and gradient of the batch at the model's weights.

    `starts` are the logprobs before the first update; None on the first, whose own forward pass gives them: weights,
    packing and replay are the same, so the update ratio is exactly 1. `reference` are the reference policy's, [P] per
    micro-batch, where the objective has a KL term. Every micro-batch's gradient starts from zero. Over several ranks each
    computes its share, and gets the gradient of the parameters whose `owners` it is.
    """
    gradients, own = GradientSum(), dict[int, _Computed]()
    for index in ranks.share(len(batch.micro_batches)):
        prepared = batch.micro_batches[index]
        if not len(prepared.rows):
            gradients.push(index, None)
            continue
        metrics, replay = Tally(), prepared.replay()
        with tally.seconds("forward"):
            scores = score_rows(
                model, prepared.micro_batch, prepared.rows, head_chunk_tokens, full=objective.full_support,
                weigh=objective.weigh, projection=objective.projection, decide=replay,
            )  # fmt: skip
        for name, share in ({} if replay is None else replay.shares()).items():
            metrics.mean(f"replay/{name}", share)
        proximal = _start_of(scores, prepared)
        start = proximal if starts is None else starts[index]
        parts = _terms(scores, start, prepared, objective, metrics, None if reference is None else reference[index])
        total = torch.stack([(weights * terms).sum() for weights, terms in parts]).sum()
        with tally.seconds("backward"):
            gradients.push(index, _gradient(total, model))
        loss = sum(float((weights.double() * terms.detach().double()).sum()) for weights, terms in parts)
        metrics.mean("entropy", scores.entropy_R[prepared.policy_P])
        own[index] = _Computed(loss, proximal, metrics)
    with tally.seconds("exchange"):
        gradient = ranks.sum(
            gradients,
            [len(prepared.rows) > 0 for prepared in batch.micro_batches],
            owners,
            [weight.shape for weight in model.trained_weights().values()],
        )
        computed = {index: part for found in ranks.gather(own) for index, part in found.items()}
    if gradient is None:
        raise ValueError("a batch without a trained token has no gradient")
    for part in gradient:
        if part is not None:
            part.div_(batch.denominator)
    loss = 0.0
    for index in sorted(computed):
        loss += computed[index].loss
        tally.add(computed[index].tally)
    all_starts = (computed[i].start if i in computed else NOTHING for i in range(len(batch.micro_batches)))
    return BatchGradient(loss / batch.denominator, gradient, tuple(all_starts))


def _gradient(total: Tensor, model: Llama) -> Gradient:
    """Of what trains, in float32 (of float64 weights in float64). Raises ValueError for an adapter that the network's forward leaves out: it would never learn."""
    trained = model.trained_weights()
    if model.adapters is not None and not total.requires_grad:
        parts: Sequence[Tensor | None] = (None,) * len(trained)
    else:
        parts = torch.autograd.grad(total, list(trained.values()), allow_unused=True)
    unused = [name for name, part in zip(trained, parts, strict=True) if part is None]
    if unused and model.adapters is not None:
        raise ValueError(
            f"{unused[0]} and {len(unused) - 1} more have no part in the network's forward: a subclass of Llama must multiply "
            "by its projections through `project`"
        )
    pairs = zip(trained.values(), parts, strict=True)
    return [widened(torch.zeros_like(weight) if part is None else part) for weight, part in pairs]


@torch.no_grad()
def with_own_decisions(
    model: Llama, batch: PreparedBatch, names: Collection[str], ranks: Ranks = ALONE
) -> PreparedBatch:
    """The batch such that what follows replays what the model's present weights decide, of the micro-batches that are computed here."""
    micro_batches = list(batch.micro_batches)
    for index in ranks.share(len(micro_batches)):
        if len(micro_batches[index].rows):
            decided = _decided(model, micro_batches[index].micro_batch)
            micro_batches[index] = replace(micro_batches[index], replayed={name: decided[name] for name in names})
    return replace(batch, micro_batches=tuple(micro_batches))


def _decided(model: Llama, micro_batch: MicroBatch) -> dict[str, Tensor]:
    """What the network decides of every token, by name [T, P, W]."""
    recorder = TokenRecorder()
    read_states(model, (), micro_batch, np.zeros(0, np.int64), lambda hidden_NM, _: (hidden_NM,), recorder)
    return recorder.rows()


@torch.no_grad()
def reference_logprobs(
    model: Llama, batch: PreparedBatch, objective: Objective, head_chunk_tokens: int, ranks: Ranks = ALONE
) -> tuple[Tensor, ...]:
    """Of the model's present weights, float32 [P] per micro-batch, over the support of the KL term."""
    own = []
    for index in ranks.share(len(batch.micro_batches)):
        prepared = batch.micro_batches[index]
        if not len(prepared.policy_P):
            own.append(torch.zeros(0))
            continue
        scores = score_rows(
            model, prepared.micro_batch, prepared.rows, head_chunk_tokens, full=objective.full_support,
            decide=prepared.replay(),
        )  # fmt: skip
        own.append(scores.full_R[prepared.policy_P])
    return tuple(part for found in ranks.gather(own) for part in found)


def _start_of(scores: RowScores, prepared: PreparedMicroBatch) -> Start:
    return Start(scores.logprobs_R.detach()[prepared.policy_P], scores.full_R.detach()[prepared.policy_P])


def _terms(
    scores: RowScores,
    start: Start,
    prepared: PreparedMicroBatch,
    objective: Objective,
    tally: Tally,
    reference_P: Tensor | None,
) -> list[tuple[Tensor, Tensor]]:
    """Weights and un-normalised losses: -logprob of what is imitated, the objective of what the policy sampled."""
    imitated_S = -scores.logprobs_R[prepared.supervised_S]
    tally.mean("loss/supervised", imitated_S)
    parts = [(prepared.weights_S, imitated_S)]
    if not len(prepared.policy_P):
        return parts
    tokens = _policy_tokens(scores, start, prepared, reference_P)
    return [*parts, (prepared.on_branches.weights_O, policy_terms(tokens, objective, tally))]


def _policy_tokens(
    scores: RowScores, start: Start, prepared: PreparedMicroBatch, reference_P: Tensor | None
) -> PolicyTokens:
    on, policy = prepared.on_branches, prepared.policy_P
    place = on.policy_F
    logprobs = scores.logprobs_R[policy][place]
    if on.own_O is not None:
        constant = logprobs.detach()
        logprobs = constant.index_put((on.own_O,), logprobs[on.own_O])
    reference = None
    if reference_P is not None:
        own = scores.full_R[policy][place]
        reference = Reference(own_P=own, start_P=start.full_P[place], reference_P=reference_P[place])
    return PolicyTokens(
        logprobs_P=logprobs,
        proximal_P=start.proximal_P[place],
        behaviour_P=prepared.behaviour_P[place],
        credit_P=prepared.credit_P[place],
        branches=on.branches,
        reference=reference,
        expected_P=None if scores.expected_R is None else scores.expected_R[policy][place],
        own_O=on.own_O,
    )


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
