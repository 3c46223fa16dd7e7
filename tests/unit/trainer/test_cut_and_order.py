"""A batch's gradient is a matter of its tokens: neither the cut into micro-batches nor their order moves it beyond rounding."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.trainer.test_batch_gradient import batched, packed
from tests.unit.trainer.tiny import SHAPE, tiny

from everlong.contracts.tokens import TokenColumns
from everlong.trainer.config import GrpoConfig, RatioConfig, SapoConfig
from everlong.trainer.objective import Objective
from everlong.trainer.preparation import prepare_batch
from everlong.trainer.step import batch_gradient
from everlong.trainer.tally import Tally

LENGTHS = (3, 1, 5, 2, 4, 3)


def rows():
    """An episode each, with a prompt of its own."""
    generator = torch.Generator().manual_seed(5)
    for episode, length in enumerate(LENGTHS):
        prompt, ids = (torch.randint(0, 11, (n,), generator=generator).tolist() for n in (3, length))
        logprobs = (-torch.rand(length, generator=generator) - 1).tolist()
        credit = 1.0 - 0.4 * episode
        yield TokenColumns.context(prompt), TokenColumns.sampled_tokens(ids, logprobs, version=0).with_credit(credit)


ROWS = list(rows())


def gradient(cut, loss, dtype):
    """Of micro-batches of the given episodes, as one vector."""
    micro_batches = []
    for episodes in cut:
        pieces = []
        for episode in episodes:
            prompt, answer = ROWS[episode]
            pieces += [(-1, -1, prompt), (len(pieces), episode, answer)]
        micro_batches.append(packed(*pieces))
    objective, model = Objective(loss, RatioConfig()), tiny(dtype)
    batch = prepare_batch(batched(*micro_batches, counts=LENGTHS), objective, SHAPE)
    return torch.cat([part.flatten() for part in batch_gradient(model, batch, objective, None, 512, Tally()).gradient])


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def precision(request, monkeypatch):
    """Type of everything that is computed, and how far two gradients of one batch may be apart, of their norm."""
    if request.param is torch.float64:
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    return request.param, 1e-10 if request.param is torch.float64 else 1e-5


@st.composite
def cuts(draw):
    order = draw(st.permutations(range(len(LENGTHS))))
    ends = sorted(draw(st.sets(st.integers(1, len(LENGTHS) - 1))))
    return [order[start:end] for start, end in zip([0, *ends], [*ends, len(LENGTHS)], strict=True)]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=cuts())
@pytest.mark.parametrize("loss", [SapoConfig(), GrpoConfig(reduction="episode")], ids=["tokens", "episodes"])
def test_any_cut_in_any_order_gives_the_gradient_of_the_whole(precision, loss, cut):
    dtype, bound = precision
    whole, got = (gradient(each, loss, dtype) for each in ([range(len(LENGTHS))], cut))
    assert got.dtype == dtype
    assert float((got - whole).norm() / whole.norm()) <= bound
