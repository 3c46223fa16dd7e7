"""A tree that passes in parts has the states and the gradients of one that passes at once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.models.forests import forests

from everlong.contracts.records import MicroBatch, Segment
from everlong.contracts.tokens import TokenColumns
from everlong.models.adapter_config import LoraConfig
from everlong.models.attention import KeyMemory, PassAttention
from everlong.models.head import token_logprobs
from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.models.numerics import Numerics
from everlong.models.tree_layout import lay_out
from everlong.models.tree_pass import parts_of, read_states

SHAPE = LlamaConfig(
    vocab_size=30, padded_vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=4, max_positions=1024,
)  # fmt: skip


def model_of(dtype=torch.float64, numerics=Numerics.FAST):
    model = Llama(SHAPE, dtype=dtype, numerics=numerics)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.named_weights().values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 if weight.ndim == 2 else 1.0)
    return model


def micro_batch_of(segments, pass_tokens=None):
    total = sum(length for _, _, length in segments)
    return MicroBatch(
        columns=TokenColumns.context(np.arange(total) * 7 % 30),
        segments=tuple(Segment(parent=p, start=s, length=n, episode=0) for p, s, n in segments),
        pass_tokens=pass_tokens,
    )


def logprobs_of(model, micro_batch, tokens):
    """Of a label under the state of each token, chunk by chunk; the weights that train."""
    weights = list(model.trained_weights().values())

    def read(hidden, rows):
        labels = torch.from_numpy(tokens[rows] * 3 % 30)
        return token_logprobs(
            hidden, model.head_weight, SHAPE, labels, torch.ones(len(rows)), None, model.numerics, chunk_tokens=5
        )

    return read_states(model, weights, micro_batch, tokens, read)[0], weights


def score(model, micro_batch, tokens):
    """Logprobs and the gradient of their weighted sum."""
    logprobs, weights = logprobs_of(model, micro_batch, tokens)
    coefficients = torch.linspace(-1, 1, len(tokens)).to(logprobs.dtype)
    gradient = torch.autograd.grad((logprobs * coefficients).sum(), weights, allow_unused=True)
    return logprobs.detach(), [torch.zeros_like(w) if g is None else g for w, g in zip(weights, gradient, strict=True)]


@settings(max_examples=40, deadline=None)
@given(forests(), st.integers(1, 30), st.integers(0, 2**16), st.booleans())
def test_cut_trees_give_the_uncut_states_and_gradient_to_1e_10(segments, limit, seed, adapted):
    """Wherever they are cut, whichever rows are read, of all weights or of adapters."""
    rng = np.random.default_rng(seed)
    total = sum(length for _, _, length in segments)
    tokens = rng.permutation(total)[: rng.integers(1, total + 1)]
    model = model_of()
    if adapted:
        model.adapt(LoraConfig(rank=2))
        with torch.no_grad():
            for weight in model.trained_weights().values():
                weight.copy_(torch.from_numpy(rng.normal(0, 0.3, tuple(weight.shape))))
    whole, gradient = score(model, micro_batch_of(segments), tokens)
    cut, parts_gradient = score(model, micro_batch_of(segments, limit), tokens)
    assert torch.allclose(cut, whole, rtol=1e-10, atol=1e-12)
    assert distance(parts_gradient, gradient) < 1e-10


def distance(ours, theirs):
    """Norm of the difference of two gradients, relative to the second's."""
    ours, theirs = (torch.cat([part.flatten() for part in gradient]) for gradient in (ours, theirs))
    return float((ours - theirs).norm() / theirs.norm())


TRUNK = [(-1, 0, 90), (0, 90, 40), (0, 130, 200), (2, 330, 35), (2, 365, 60), (4, 425, 30), (4, 455, 3)]


@pytest.mark.parametrize("limit", [458, 457, 100, 64, 37])
def test_aligned_logprobs_have_the_same_bits_in_any_parts(limit):
    model, tokens = model_of(torch.float32, Numerics.ALIGNED), np.arange(458)
    whole, gradient = score(model, micro_batch_of(TRUNK), tokens)
    cut, parts_gradient = score(model, micro_batch_of(TRUNK, limit), tokens)
    assert torch.equal(cut, whole)
    assert distance(parts_gradient, gradient) < 1e-5


def test_the_same_parts_give_the_same_bits():
    model, tokens = model_of(torch.float32), np.arange(458)
    first, second = (score(model, micro_batch_of(TRUNK, 100), tokens) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


def test_parts_are_few_and_of_nearly_one_size():
    assert parts_of(10, 10) == ((0, 10),)
    assert parts_of(11, 10) == ((0, 5), (5, 11))
    assert parts_of(25, 10) == ((0, 8), (8, 16), (16, 25))


def test_only_what_a_later_part_sees_is_held():
    """Two trees of a prompt and three answers: cut between the trees nothing is seen later; cut in the second its prompt is."""
    segments = [(-1, 0, 10), (0, 10, 5), (0, 15, 5), (0, 20, 5)]
    both = segments + [(parent + 4 if parent >= 0 else -1, start + 25, length) for parent, start, length in segments]
    layout = lay_out(both)
    assert KeyMemory(layout, [(0, 25), (25, 50)]).num_held == 0
    assert KeyMemory(layout, [(0, 25), (25, 45), (45, 50)]).num_held == 10


def test_values_of_adapters_left_out_of_the_forward_have_no_gradient():
    """Rather than one of zeros: a trainer can then tell."""

    class Deaf(Llama):
        def project(self, layer, projection, x, weight):
            return x @ weight.T

    model = Deaf(SHAPE)
    model.adapt(LoraConfig(rank=2))
    logprobs, weights = logprobs_of(model, micro_batch_of(TRUNK, 100), np.arange(458))
    assert torch.autograd.grad(logprobs.sum(), weights, allow_unused=True) == (None,) * len(weights)


def peak_bytes(num_tokens, numerics):
    """Of attention over a trunk with a leaf at every 50 tokens, forward and backward."""
    segments, at = [], 0
    for _ in range(num_tokens // 60):
        trunk = len(segments) - 2
        segments += [(max(trunk, -1), at, 50), (len(segments), at + 50, 10)]
        at += 60
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(at, heads, 4, generator=generator, requires_grad=True) for heads in (2, 1, 1))
    attend = PassAttention(lay_out(segments), 0.5, numerics)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        attend(0, q, k, v).sum().backward()
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return int(np.cumsum(sizes).max())


def test_memory_grows_with_the_tokens_and_not_with_their_square():
    short, long = peak_bytes(1200, Numerics.FAST), peak_bytes(9600, Numerics.FAST)
    assert long < 10 * short
    assert long < 9600 * 9600  # a quarter of what scores of one head would take
