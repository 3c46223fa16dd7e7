"""One gradient from one batch: run micro-batch by micro-batch, summed by index, divided when it closes."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from everlong.models.decisions import Recorder
from everlong.models.llama.model import Llama
from everlong.trainer.gradient_sum import Gradient, GradientSum
from everlong.trainer.objective import Objective, PolicyTokens, Reference, policy_terms
from everlong.trainer.preparation import PreparedBatch, PreparedMicroBatch
from everlong.trainer.scoring import RowScores, hidden_states, score_rows
from everlong.trainer.tally import Tally

# R trained rows of a micro-batch; P of them the policy sampled, S are supervised


@dataclass(frozen=True, slots=True)
class Start:
    """Logprobs of one micro-batch before the first update, float32 [P], detached."""

    proximal_P: Tensor
    full_P: Tensor
    """Over the whole vocabulary where the objective asks for it; else the same."""


@dataclass(frozen=True, slots=True)
class BatchGradient:
    loss: float
    gradient: Gradient
    starts: tuple[Start, ...]
    """Per micro-batch, of the weights that the gradient was taken at."""


NOTHING = Start(torch.zeros(0), torch.zeros(0))


def batch_gradient(
    model: Llama,
    batch: PreparedBatch,
    objective: Objective,
    starts: Sequence[Start] | None,
    head_chunk_tokens: int,
    tally: Tally,
    reference: Sequence[Tensor] | None = None,
) -> BatchGradient:
    """Loss and gradient of the batch at the model's weights.

    `starts` are the logprobs before the first update; None on the first, whose own forward pass gives them: weights,
    packing and replay are the same, so the update ratio is exactly 1. `reference` are the reference policy's, [P] per
    micro-batch, where the objective has a KL term. Every micro-batch's gradient starts from zero.
    """
    gradients, loss, own_starts = GradientSum(), 0.0, []
    for index, prepared in enumerate(batch.micro_batches):
        if not len(prepared.rows):
            gradients.push(index, None)
            own_starts.append(NOTHING)
            continue
        replay = prepared.replay()
        with tally.seconds("forward"):
            scores = score_rows(
                model, prepared.micro_batch, prepared.rows, head_chunk_tokens, full=objective.full_support,
                weigh=objective.weigh, decide=replay,
            )  # fmt: skip
        for name, share in ({} if replay is None else replay.shares()).items():
            tally.mean(f"replay/{name}", share)
        own = _start_of(scores, prepared)
        start = own if starts is None else starts[index]
        terms_R = _terms(scores, start, prepared, objective, tally, None if reference is None else reference[index])
        total = (prepared.weights_R * terms_R).sum()
        with tally.seconds("backward"):
            gradients.push(index, _gradient(total, model))
        loss += float((prepared.weights_R.double() * terms_R.detach().double()).sum())
        own_starts.append(own)
        tally.mean("entropy", scores.entropy_R[prepared.policy_P])
    gradient = gradients.close(len(batch.micro_batches))
    if gradient is None:
        raise ValueError("a batch without a trained token has no gradient")
    for part in gradient:
        part.div_(batch.denominator)
    return BatchGradient(loss / batch.denominator, gradient, tuple(own_starts))


def _gradient(total: Tensor, model: Llama) -> Gradient:
    """Of what trains, in float32. Raises ValueError for an adapter that the network's forward leaves out: it would never learn."""
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
    return [torch.zeros_like(weight).float() if part is None else part.float() for weight, part in pairs]


@torch.no_grad()
def with_own_decisions(model: Llama, batch: PreparedBatch, names: Collection[str]) -> PreparedBatch:
    """The batch such that what follows replays what the model's present weights decide."""

    def decided(prepared: PreparedMicroBatch) -> PreparedMicroBatch:
        recorder = Recorder()
        hidden_states(model, prepared.micro_batch, recorder)
        return replace(prepared, replayed={name: rows for name, rows in recorder.rows().items() if name in names})

    return replace(batch, micro_batches=tuple(decided(p) if len(p.rows) else p for p in batch.micro_batches))


@torch.no_grad()
def reference_logprobs(
    model: Llama, batch: PreparedBatch, objective: Objective, head_chunk_tokens: int
) -> tuple[Tensor, ...]:
    """Of the model's present weights, float32 [P] per micro-batch, over the support of the KL term."""
    found = []
    for prepared in batch.micro_batches:
        if not len(prepared.policy_P):
            found.append(torch.zeros(0))
            continue
        scores = score_rows(
            model, prepared.micro_batch, prepared.rows, head_chunk_tokens, full=objective.full_support,
            decide=prepared.replay(),
        )  # fmt: skip
        found.append(scores.full_R[prepared.policy_P])
    return tuple(found)


def _start_of(scores: RowScores, prepared: PreparedMicroBatch) -> Start:
    return Start(scores.logprobs_R.detach()[prepared.policy_P], scores.full_R.detach()[prepared.policy_P])


def _terms(
    scores: RowScores,
    start: Start,
    prepared: PreparedMicroBatch,
    objective: Objective,
    tally: Tally,
    reference_P: Tensor | None,
) -> Tensor:
    """Un-normalised loss per trained row: the objective where the policy sampled, else -logprob."""
    imitated = -scores.logprobs_R[prepared.supervised_S]
    tally.mean("loss/supervised", imitated)
    terms_R = torch.zeros_like(scores.logprobs_R).index_put((prepared.supervised_S,), imitated)
    if not len(prepared.policy_P):
        return terms_R
    tokens = PolicyTokens(
        logprobs_P=scores.logprobs_R[prepared.policy_P],
        proximal_P=start.proximal_P,
        behaviour_P=prepared.behaviour_P,
        credit_P=prepared.credit_P,
        branches=prepared.branches,
        expected_P=None if scores.expected_R is None else scores.expected_R[prepared.policy_P],
        reference=None
        if reference_P is None
        else Reference(own_P=scores.full_R[prepared.policy_P], start_P=start.full_P, reference_P=reference_P),
    )
    return terms_R.index_put((prepared.policy_P,), policy_terms(tokens, objective, tally))


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
