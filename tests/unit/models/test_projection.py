"""Zero-sum projection of the logit gradient: worked out by hand, in float64, and where the head's backward takes it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.models.test_head import config_of

from everlong.models.head import token_logprobs
from everlong.models.numerics import Numerics
from everlong.models.projection import zero_sum

PROJECTIONS = ["mean", "exact_target"]
ABSORBED = [20.0, 0.0, 1.0, -1.0]
"""Logits whose largest takes up the rest in float32."""


def gradient_of_loss(logits, labels, projection, kept=None, padded=None, dtype=torch.float32, temperature=1.0):
    """Of -log p in the logits as the backward products take it: the head is the identity."""
    rows, width = len(logits), len(logits[0])
    hidden = torch.tensor(logits, requires_grad=True)
    head = torch.zeros(padded or width, width, dtype=dtype)
    head[:width] = torch.eye(width)
    logprobs, _ = token_logprobs(
        hidden, head.requires_grad_(), config_of(width, padded=padded, width=width), torch.tensor(labels),
        torch.full((rows,), temperature), kept, Numerics.FAST, projection=projection,
    )  # fmt: skip
    (-logprobs.sum()).backward()
    assert hidden.grad is not None and head.grad is not None
    return hidden.grad, head.grad


def test_where_rounding_takes_the_label_s_gradient_the_rest_drifts_and_the_projection_stops_it():
    gradient = {name: gradient_of_loss([ABSORBED], [0], name)[0][0] for name in ("none", *PROJECTIONS)}
    assert gradient["none"].tolist() == pytest.approx([0, 2.0612e-9, 5.6028e-9, 7.5826e-10], rel=1e-4)
    assert gradient["none"].sum().item() == pytest.approx(8.4222e-9, rel=1e-4)
    expected = [-2.1056e-9, -4.44e-11, 3.4972e-9, -1.3473e-9]
    assert gradient["mean"].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-13)
    # what the label has in float64
    assert gradient["exact_target"].tolist() == pytest.approx([-8.4222e-9, 2.0612e-9, 5.6028e-9, 7.5826e-10], rel=1e-4)
    assert max(abs(gradient[name].sum().item()) for name in PROJECTIONS) < 1e-15


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_only_ids_that_can_be_sampled_take_part(projection):
    kept = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([0, 3])
    by_hidden, _ = gradient_of_loss([ABSORBED], [0], projection, kept)
    assert by_hidden[0, 1] == 0.0 and by_hidden.sum().abs() < 1e-15 < by_hidden[0, 2]
    _, by_head = gradient_of_loss([ABSORBED] * 2, [0, 2], projection, padded=6)
    assert by_head[4:].eq(0).all(), "rows of the padded vocabulary"
    some = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 2, 2])
    _, by_head = gradient_of_loss([ABSORBED] * 2, [0, 2], projection, some, padded=6)
    assert by_head[4:].eq(0).all(), "beside a row that keeps all"


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_a_token_without_choice_keeps_a_gradient_of_exactly_zero(projection):
    kept = torch.tensor([1], dtype=torch.int32), torch.tensor([0, 1])
    assert gradient_of_loss([ABSORBED], [1], projection, kept)[0].tolist() == [[0.0] * 4]


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_what_the_product_takes_sums_to_nothing_although_the_weights_are_bfloat16(projection):
    """Each share of 1/37 is rounded the same way by the cast, and the rounding adds up."""
    width = 37
    sums = {}
    for name in ("none", projection):
        hidden = torch.zeros(1, width, requires_grad=True)
        head = torch.ones(width, width, dtype=torch.bfloat16)
        logprobs, _ = token_logprobs(
            hidden, head, config_of(width, width=width), torch.tensor([0]), torch.ones(1), None, Numerics.FAST,
            projection=name,
        )  # fmt: skip
        (sums[name],) = torch.autograd.grad(logprobs.sum(), hidden)  # each entry is the sum over the vocabulary
    assert sums["none"].abs().max() > 1e-3
    assert sums[projection].abs().max() < 1e-6


rows = st.lists(st.floats(-30, 30), min_size=3, max_size=8)


@given(rows, st.integers(0, 2), st.floats(0.1, 10), st.floats(-2, 2))
def test_the_mean_is_idempotent_removes_what_all_have_and_commutes_with_weights(values, label, weight, shared):
    gradient, labels = torch.tensor([values], dtype=torch.float64), torch.tensor([label])

    def project(row):
        return zero_sum(row.clone(), len(values), labels, "mean")

    once = project(gradient)
    torch.testing.assert_close(project(once), once)
    torch.testing.assert_close(project(gradient + shared), once)
    torch.testing.assert_close(project(weight * gradient), weight * once)
    assert once.sum().abs() < 1e-9


@given(rows, st.integers(0, 2), st.sampled_from(PROJECTIONS))
def test_an_exact_gradient_stays_as_it_is(logits, label, projection):
    exact = torch.tensor([logits], dtype=torch.float64).softmax(-1)
    exact[0, label] = -(exact[0, :label].sum() + exact[0, label + 1 :].sum())
    found = zero_sum(exact.clone(), len(logits), torch.tensor([label]), projection)
    torch.testing.assert_close(found, exact, rtol=1e-14, atol=1e-16)


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_where_nothing_is_absorbed_the_projection_changes_rounding_alone(projection):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 9, generator=generator).tolist()
    kept = torch.tensor([0, 4, 1, 2, 3, 0, 5], dtype=torch.int32), torch.tensor([0, 2, 2, 5, 5, 5, 7])
    labels = [4, 8, 1, 0, 7, 5]
    plain = gradient_of_loss(logits, labels, "none", kept, temperature=0.7)
    for mine, other in zip(gradient_of_loss(logits, labels, projection, kept, temperature=0.7), plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
