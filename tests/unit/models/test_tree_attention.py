"""Packed forests: a segment sees its path to the root and nothing else."""

import pytest
import torch
from torch import Tensor

from everlong.models.attention import TreeAttention
from everlong.models.head import token_logprobs
from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.models.numerics import Numerics

# T tokens, H query heads, G key-value heads, D head width

SCALE = 8**-0.5
FOREST = [(-1, 0, 9), (0, 9, 20), (0, 29, 3), (1, 32, 17), (-1, 49, 5), (2, 54, 30), (1, 84, 0), (6, 84, 4)]
"""Two roots; a fork of a fork; an empty segment with a child."""


def path_of(segments: list[tuple[int, int, int]], index: int) -> list[int]:
    parent, start, length = segments[index]
    above = path_of(segments, parent) if parent >= 0 else []
    return above + list(range(start, start + length))


def positions_of(segments: list[tuple[int, int, int]]) -> Tensor:
    positions = torch.zeros(sum(length for _, _, length in segments), dtype=torch.long)
    for index, (_, start, length) in enumerate(segments):
        end = len(path_of(segments, index))
        positions[start : start + length] = torch.arange(end - length, end)
    return positions


def two_layers(numerics: Numerics = Numerics.FAST) -> Llama:
    config = LlamaConfig(
        vocab_size=30, padded_vocab_size=32, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
        num_kv_heads=2, head_dim=8, max_positions=128,
    )  # fmt: skip
    model = Llama(config, numerics=numerics)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.named_weights().values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 if weight.ndim == 2 else 1.0)
    return model


def logprobs_of(model: Llama, ids: Tensor, segments: list[tuple[int, int, int]], positions: Tensor) -> Tensor:
    """Of every token under its own hidden state; labels are fixed, so that only what is attended to matters."""
    hidden = model(ids, positions, TreeAttention(segments, SCALE, model.numerics))
    labels = torch.arange(len(ids)) % 30
    return token_logprobs(hidden, model.head_weight, model.config, labels, torch.ones(len(ids)), None, model.numerics)[
        0
    ]


@pytest.mark.parametrize(("numerics", "tolerance"), [(Numerics.FAST, 1e-5), (Numerics.ALIGNED, 0.0)])
def test_packed_sequences_score_as_they_do_apart(numerics: Numerics, tolerance: float):
    model = two_layers(numerics)
    ids = torch.arange(12) * 7 % 30
    positions = torch.cat([torch.arange(5), torch.arange(7)])
    packed = logprobs_of(model, ids, [(-1, 0, 5), (-1, 5, 7)], positions)
    labels = torch.arange(12)
    apart = []
    for start, stop in ((0, 5), (5, 12)):
        whole = TreeAttention([(-1, 0, stop - start)], SCALE, numerics)
        hidden = model(ids[start:stop], positions[start:stop], whole)
        apart.append(
            token_logprobs(
                hidden, model.head_weight, model.config, labels[start:stop], torch.ones(stop - start), None, numerics
            )[0]
        )
    assert (packed - torch.cat(apart)).abs().max() <= tolerance
    # what a dropped boundary would do, so that the claim can fail: with and without the reset of positions
    for lost in (positions, torch.arange(12)):
        assert (logprobs_of(model, ids, [(-1, 0, 12)], lost) - packed).abs()[5:].max() > 1e-2


@pytest.mark.parametrize("numerics", Numerics)
def test_a_token_changes_only_what_stands_below_it(numerics: Numerics):
    model = two_layers(numerics)
    ids = torch.arange(88) * 11 % 30
    positions = positions_of(FOREST)
    before = logprobs_of(model, ids, FOREST, positions)
    for changed in (3, 30, 33, 50, 85):
        other = ids.clone()
        other[changed] = (other[changed] + 1) % 30
        differs = set((logprobs_of(model, other, FOREST, positions) != before).nonzero()[:, 0].tolist())
        below: set[int] = set()
        for index in range(len(FOREST)):
            path = path_of(FOREST, index)
            if changed in path:
                below |= set(path[path.index(changed) :])
        assert changed in differs
        assert differs <= below
        assert len(differs) > len(below) / 2


def _plain(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
    repeats = q_THD.shape[1] // k_TGD.shape[1]
    k, v = (t.repeat_interleave(repeats, 1) for t in (k_TGD, v_TGD))
    scores = torch.einsum("qhd,khd->hqk", q_THD, k) * SCALE
    causal = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~causal, -torch.inf).softmax(-1), v)


def test_a_trees_forward_and_gradient_equal_its_branches_in_float64():
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(88, 4, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 88, 2, 8, generator=generator, dtype=torch.float64)
    direction = torch.randn(88, 4, 8, generator=generator, dtype=torch.float64)
    tree = [t.clone().requires_grad_() for t in (q, k, v)]
    flat = [t.clone().requires_grad_() for t in (q, k, v)]
    out = TreeAttention(FOREST, SCALE, Numerics.FAST)(0, *tree)
    (out * direction).sum().backward()
    for index, (_, start, length) in enumerate(FOREST):
        if length:  # a shared token counts once: each path contributes its own last segment
            path = path_of(FOREST, index)
            own = _plain(*(t[path] for t in flat))[-length:]
            assert torch.allclose(out[start : start + length], own, rtol=1e-10, atol=1e-12)
            (own * direction[start : start + length]).sum().backward()
    for ours, theirs in zip(tree, flat, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)


def test_the_models_gradient_over_a_tree_is_that_of_its_branches():
    segments = FOREST[:4]
    ids = torch.arange(49) * 11 % 30
    tree, flat = two_layers(), two_layers()
    weights = torch.linspace(-1, 1, 49)
    (logprobs_of(tree, ids, segments, positions_of(segments)) * weights).sum().backward()
    for index, (_, start, length) in enumerate(segments):
        path = torch.tensor(path_of(segments, index))
        hidden = flat(ids[path], torch.arange(len(path)), TreeAttention([(-1, 0, len(path))], SCALE, Numerics.FAST))
        logprobs, _ = token_logprobs(
            hidden, flat.head_weight, flat.config, path % 30, torch.ones(len(path)), None, Numerics.FAST
        )
        (logprobs[-length:] * weights[start : start + length]).sum().backward()
    for (name, ours), theirs in zip(tree.named_weights().items(), flat.named_weights().values(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("numerics", Numerics)
def test_gradients_repeat_to_the_bit(numerics: Numerics):
    """On two threads, where adding a shared key's gradients in order of arrival would differ from run to run."""
    segments = [(-1, 0, 120)] + [(0, 120 + 50 * i, 50) for i in range(6)]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(420, heads, 32, generator=generator) for heads in (4, 2, 2))
    direction = torch.randn(420, 4, 32, generator=generator)
    attend = TreeAttention(segments, 32**-0.5, numerics)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        seen = []
        for _ in range(4):
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            (attend(0, *leaves) * direction).sum().backward()
            seen.append([leaf.grad for leaf in leaves])
    finally:
        torch.set_num_threads(threads)
    for grads in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, seen[0], strict=True))
