"""What a token counts that several branches share: once, a constant in the others' ratios, or on every branch. In float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.unit.trainer.forked import branches_of, flattened, groups, packed
from tests.unit.trainer.tiny import SHAPE, tiny

from everlong.contracts.records import MicroBatch, Segment
from everlong.trainer.config import (
    CispoConfig,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    GspoTokenConfig,
    KimiConfig,
    KlLoss,
    KlReward,
    MisPo,
    RatioConfig,
    ReinforceConfig,
    SapoConfig,
    SequenceGeometric,
    SequenceProduct,
    TokenTruncation,
)
from everlong.trainer.objective import Objective
from everlong.trainer.preparation import prepare_batch
from everlong.trainer.replay import rows_of
from everlong.trainer.scoring import score_rows
from everlong.trainer.step import batch_gradient, reference_logprobs
from everlong.trainer.tally import Tally

WIDE = {"clip_low": 0.9, "clip_high": 9.0}
PROXIMAL = RatioConfig(base="proximal", correction=SequenceGeometric(low=0.01, high=90.0), off_policy_drop=5.0)
OBJECTIVES = [
    Objective(SapoConfig(), RatioConfig()),
    Objective(SapoConfig(reduction="sequence"), RatioConfig()),
    Objective(GrpoConfig(reduction="group"), RatioConfig()),
    Objective(GrpoConfig(level="sequence", reduction="episode", **WIDE), RatioConfig()),
    Objective(GrpoConfig(level="sequence_token", **WIDE), PROXIMAL),
    Objective(DrGrpoConfig(constant_length=20), RatioConfig(base="proximal", correction=TokenTruncation())),
    Objective(CispoConfig(level="sequence"), RatioConfig()),
    Objective(GspoConfig(**WIDE), RatioConfig(), KlLoss(estimator="k3", support="full")),
    Objective(GspoTokenConfig(**WIDE), RatioConfig(), KlReward(estimator="k1")),
    Objective(KimiConfig(reduction="group"), PROXIMAL),
    Objective(ReinforceConfig(), RatioConfig(correction=SequenceProduct(low=0.5, high=2.0, outside="truncate"))),
    Objective(ReinforceConfig(), RatioConfig(correction=MisPo(token_low=None, token_high=None, sequence_low=0.2, sequence_high=9.0))),
    Objective(ReinforceConfig(reduction="sequence"), RatioConfig(correction=TokenTruncation(cap=3.0), score_centring=True)),
]  # fmt: skip


def counted(objective, shared_prefix):
    return Objective(objective.loss, objective.ratio, objective.kl, shared_prefix=shared_prefix)


def moved(model):
    """The same network after a step."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in model.named_weights().values():
            weight.add_(torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * 0.02)
    return model


def two_gradients(batch, objective, chunk=512):
    """Before the first update and after it, as one long vector each; their losses."""
    prepared = prepare_batch(batch, objective, SHAPE)
    reference = None
    if objective.kl.type != "none":
        reference = reference_logprobs(moved(moved(tiny(torch.float64))), prepared, objective, chunk)
    first = batch_gradient(tiny(torch.float64), prepared, objective, None, chunk, Tally(), reference)
    again = batch_gradient(moved(tiny(torch.float64)), prepared, objective, first.starts, chunk, Tally(), reference)
    return [(step.loss, torch.cat([part.flatten() for part in step.gradient])) for step in (first, again)]


def assert_equal(ours, theirs):
    for (loss, gradient), (other_loss, other) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-10, abs=1e-12)
        assert float((gradient - other).norm()) <= 1e-10 * float(other.norm()) + 1e-14


@settings(max_examples=40, deadline=None)
@given(groups(), st.sampled_from(OBJECTIVES), st.integers(1, 60))
def test_sum_over_leaves_equals_the_flattened_branches_to_1e_10(made, objective, limit):
    tree = two_gradients(packed(made, limit), counted(objective, "sum_over_leaves"))
    assert_equal(tree, two_gradients(flattened(made), counted(objective, "once")))


@settings(max_examples=40, deadline=None)
@given(groups(masked=0.3), st.sampled_from(OBJECTIVES), st.sampled_from(["once", "sum_over_leaves"]), st.data())
def test_any_cut_of_a_batch_gives_the_same_update(made, objective, shared_prefix, data):
    """However many tokens pass at once, micro-batches hold, and logits exist."""
    objective = counted(objective, shared_prefix)
    if not packed(made).num_trainable:
        return
    expected = two_gradients(packed(made), objective)
    limit, chunk = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 9))
    assert_equal(two_gradients(packed(made, limit), objective, chunk), expected)


# Once: against branches each passed alone, every shared token trainable in the first that holds it ---------------------


def branch_logprobs(model, columns):
    """float64, of the sampled tokens that may train, with their gradient; where they stand."""
    segment = Segment(parent=-1, start=0, length=len(columns), episode=0)
    micro_batch = MicroBatch(columns=columns, segments=(segment,))
    rows = rows_of(micro_batch, columns.trainable)
    return score_rows(model, micro_batch, rows, 512).logprobs_R, rows.tokens


def gspo_term(mean, credit, logprobs):
    ratio = mean.exp()
    value = torch.minimum(ratio * credit, ratio.clamp(0.1, 10.0) * credit)
    return -value * torch.ones_like(logprobs)


def geometric_term(mean, credit, logprobs):
    return -mean.detach().exp().clamp(0.5, 2.0) * credit * logprobs


@settings(max_examples=40, deadline=None)
@given(
    groups(masked=0.2),
    st.sampled_from(
        [
            (Objective(GspoConfig(**WIDE), RatioConfig()), gspo_term),
            (
                Objective(
                    ReinforceConfig(reduction="sequence"),
                    RatioConfig(correction=SequenceGeometric(low=0.5, high=2.0, outside="truncate")),
                ),
                geometric_term,
            ),
        ]
    ),
    st.integers(1, 60),
)
def test_once_equals_branches_in_which_each_shared_token_is_trainable_in_one(made, case, limit):
    """Of a branch's ratio an earlier branch's tokens are a part, which no gradient passes."""
    objective, term = case
    model = moved(tiny(torch.float64))
    total, num_branches = torch.zeros((), dtype=torch.float64), 0
    for _, rows in branches_of(made):
        for columns, own in rows:
            logprobs, tokens = branch_logprobs(model, columns)
            own = torch.from_numpy(own[tokens])
            if not own.any():
                continue
            log_ratio = torch.where(own, logprobs, logprobs.detach()) - torch.from_numpy(columns.logprobs[tokens])
            credit = float(columns.credit[tokens][0])
            total = total + term(log_ratio.mean(), credit, logprobs)[own].sum() / int(own.sum())
            num_branches += 1
    if not num_branches:
        return
    loss = total / num_branches
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.named_weights().values()))])
    prepared = prepare_batch(packed(made, limit), objective, SHAPE)
    got = batch_gradient(model, prepared, objective, None, 512, Tally())
    # weights of the reduction are float32
    assert got.loss == pytest.approx(loss.item(), rel=1e-6, abs=1e-8)
    gradient = torch.cat([part.flatten() for part in got.gradient])
    assert float((gradient - expected).norm()) <= 1e-6 * float(expected.norm()) + 1e-9


@settings(max_examples=20, deadline=None)
@given(groups(masked=0.5), st.sampled_from(OBJECTIVES[:-1]), st.sampled_from(["once", "sum_over_leaves"]))
def test_what_is_on_record_of_a_masked_token_changes_nothing(made, objective, shared_prefix):
    """To the bit, whatever its logprob, in any ratio; its credit and its kept set neither."""
    batch, objective = packed(made), counted(objective, shared_prefix)
    if not batch.num_trainable:
        return
    expected = two_gradients(batch, objective)
    micro_batches = []
    for micro_batch in batch.micro_batches:
        columns = micro_batch.columns
        masked = columns.sampled & ~columns.trainable
        other = columns.replace(
            logprobs=np.where(masked, np.float32(-50), columns.logprobs).astype(np.float32),
            credit=np.where(masked, np.float32(7), columns.credit).astype(np.float32),
            temperatures=np.where(masked, np.float32(0.1), columns.temperatures).astype(np.float32),
        )
        micro_batches.append(MicroBatch(columns=other, segments=micro_batch.segments))
    got = two_gradients(replace(batch, micro_batches=tuple(micro_batches)), objective)
    for (loss, gradient), (other_loss, other) in zip(got, expected, strict=True):
        assert loss == other_loss and math.isfinite(loss)
        assert torch.equal(gradient, other)
