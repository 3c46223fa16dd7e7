"""The expected score of a sampler: worked out by hand, and against autograd in float64."""

import numpy as np
import pytest
import torch

from everlong.models.centring import expected_scores
from everlong.models.numerics import Numerics


def kept_of(rows):
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    return torch.tensor([i for row in rows for i in row], dtype=torch.int32), offsets


def centre(hidden, head, rows, sampler, *, weigh=torch.ones_like, temperature=1.0, chunk=512, numerics=Numerics.FAST):
    temperatures = torch.full((len(rows),), temperature)
    return expected_scores(hidden, head, temperatures, kept_of(rows), sampler, weigh, numerics, chunk)


def test_centring_removes_the_drift_of_a_mismatch():
    """p = (.6, .4), q = (.5, .5): the mean score under q is q - p = (-.1, .1), and nothing once it is centred."""
    logits = torch.tensor([[0.6, 0.4]]).log().requires_grad_()
    q = torch.tensor([0.5, 0.5])
    expected = centre(logits, torch.eye(2), [[0, 1]], q.log())
    scores = (q * logits.log_softmax(-1)[0]).sum()
    (drift,) = torch.autograd.grad(scores, logits, retain_graph=True)
    torch.testing.assert_close(drift, torch.tensor([[-0.1, 0.1]]))
    (centred,) = torch.autograd.grad(scores - expected.sum(), logits)
    torch.testing.assert_close(centred, torch.zeros(1, 2), rtol=0, atol=1e-7)


ROWS = [[1, 4, 7], [], [5], [0, 1, 2, 3], [], [2, 7]]


@pytest.mark.parametrize("chunk", [1, 4, 512])
@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("cap", [None, 1.1])
def test_value_and_gradient_equal_autograd(chunk, numerics, cap):
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, 16, generator=generator) * 0.5 for n in (len(ROWS), 9))
    sampler = torch.cat([torch.randn(len(row), generator=generator).log_softmax(0) for row in ROWS])
    upstream = torch.randn(len(ROWS), generator=generator)

    def weigh(log_ratio):
        return torch.ones_like(log_ratio) if cap is None else log_ratio.exp().clamp(max=cap)

    mine = [x.clone().requires_grad_() for x in (hidden, head)]
    got = centre(*mine, ROWS, sampler, weigh=weigh, temperature=0.7, chunk=chunk, numerics=numerics)
    exact = [x.double().requires_grad_() for x in (hidden, head)]
    expected, start = [], 0
    for row, ids in zip(exact[0], ROWS, strict=True):
        q = sampler[start : start + len(ids)].double()
        logprobs = (exact[1][ids] @ row / 0.7).log_softmax(-1) if ids else q
        expected.append((q.exp() * weigh(logprobs.detach() - q) * logprobs).sum())
        start += len(ids)
    expected = torch.stack(expected)
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    assert got[1] == got[4] == 0, "what was not truncated has no kept set to sum over"
    assert got[2] == 0, "one kept id is certain"
    gradients = torch.autograd.grad(got, mine, upstream)
    for theirs, own in zip(torch.autograd.grad(expected, exact, upstream.double()), gradients, strict=True):
        torch.testing.assert_close(own.double(), theirs, rtol=1e-4, atol=1e-6)


def test_rows_without_any_kept_set_expect_nothing():
    hidden = torch.ones(2, 3, requires_grad=True)
    got = centre(hidden, torch.ones(4, 3), [[], []], torch.zeros(0))
    assert got.tolist() == [0, 0]
    assert torch.autograd.grad(got.sum(), hidden, allow_unused=True)[0] is None
