"""QK-clip: the factors of the definition, the logits that it looks at, and what a step makes of them."""

from dataclasses import replace

import msgspec
import pytest
import torch
from tests.unit.trainer.test_policy_trainer import some_batch, trainer_of
from tests.unit.trainer.tiny import SHAPE, tiny

from everlong.models.attention import TreeAttention
from everlong.models.llama.model import Llama
from everlong.models.numerics import Numerics
from everlong.trainer.config import AdamWConfig, MuonConfig, TrainerConfig
from everlong.trainer.qk_clip import qk_clip_factors, scale_heads
from everlong.trainer.taps import HighestLogits

SEGMENTS = [(-1, 0, 3), (0, 3, 4), (1, 7, 2), (0, 9, 130), (-1, 139, 5), (4, 144, 0)]
"""Two roots; a path of three segments; one longer than a piece; an empty one."""


def test_factors_are_those_of_the_anchor():
    """A logit of 400 at a bound of 100: gamma 0.25, half by the queries and half by the keys where these are the head's own."""
    query, key = qk_clip_factors(torch.tensor([400.0, 50.0]), 100.0, 2)
    assert query.tolist() == key.tolist() == [0.5, 1.0]
    query, key = qk_clip_factors(torch.tensor([400.0, 50.0, 100.0, 200.0]), 100.0, 2)
    assert query.tolist() == [0.25, 1.0, 1.0, 0.5] and key.tolist() == [1.0, 1.0]


def test_a_head_that_met_no_token_is_left_alone():
    query, key = qk_clip_factors(torch.full((2,), -torch.inf), 100.0, 2)
    assert query.tolist() == key.tolist() == [1.0, 1.0]


def test_a_head_s_rows_alone_are_scaled():
    weight = torch.ones(6, 4)
    scale_heads(weight, torch.tensor([1.0, 0.5, 2.0]))
    assert weight[:, 0].tolist() == [1.0, 1.0, 0.5, 0.5, 2.0, 2.0]


def dense_highest(q, k, segments, scale):
    """By a mask over all pairs of tokens."""
    sees = torch.zeros(len(q), len(q), dtype=torch.bool)
    for segment in segments:
        parent, start, length = segment
        for own in range(start, start + length):
            sees[own, start : own + 1] = True
            above = parent
            while above >= 0:
                above, first, count = segments[above]
                sees[own, first : first + count] = True
    heads, repeats = q.shape[1], q.shape[1] // k.shape[1]
    logits = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(repeats, 1)) * scale
    return torch.stack([logits[head][sees].max() for head in range(heads)])


def test_the_highest_logit_counts_every_key_that_a_query_sees_and_no_other():
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(144, 4, 8, generator=generator)
    k = torch.randn(144, 2, 8, generator=generator)
    q[8] *= 50  # of the third segment: what would show if other branches' or later keys counted
    k[10] *= 50
    attention, watch = TreeAttention(SEGMENTS, 0.35, Numerics.FAST), HighestLogits(3, 4)
    expected = dense_highest(q, k, SEGMENTS, 0.35)
    for times in (1.0, 0.5):
        watch.meet(1, attention.highest_logits(1, times * q, k))
        torch.testing.assert_close(watch.highest_LH[1], expected)
    assert watch.highest_LH[[0, 2]].eq(-torch.inf).all()


def one_layer(num_kv_heads):
    """Whose logits hang on its own projections alone."""
    model = Llama(replace(SHAPE, num_layers=1, num_kv_heads=num_kv_heads))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_weights().items():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.8 + ("norm" in name))
    return model


@pytest.mark.parametrize("num_kv_heads", [2, 4], ids=["shared keys", "own keys"])
async def test_a_step_brings_every_head_down_to_the_bound(num_kv_heads):
    """At a learning rate that moves nothing else."""
    model = one_layer(num_kv_heads)
    keys = model.named_weights()["model.layers.0.self_attn.k_proj.weight"]
    before, trainer = keys.detach().clone(), trainer_of(model, optimizer=MuonConfig(learning_rate=1e-9, qk_clip=1.0))
    first = (await trainer.train(some_batch(0))).metrics
    assert first["qk_clip/highest"] > 1.5 and first["qk_clip/clipped"] > 0
    moved = (keys.detach() - before).abs().max()
    assert (moved > 0.1) if num_kv_heads == 4 else (moved < 1e-6)
    again = (await trainer.train(msgspec.structs.replace(some_batch(0), batch=1))).metrics
    assert again["qk_clip/highest"] == pytest.approx(1.0, rel=1e-3)


async def test_without_a_bound_no_logit_is_looked_at():
    for optimizer in (MuonConfig(), AdamWConfig()):
        metrics = (await trainer_of(optimizer=optimizer).train(some_batch(0))).metrics
        assert not [name for name in metrics if name.startswith("qk_clip")]


async def test_a_bound_that_no_head_reaches_changes_no_bit():
    plain, bounded = tiny(), tiny()
    await trainer_of(plain, optimizer=MuonConfig()).train(some_batch(0))
    await trainer_of(bounded, optimizer=MuonConfig(qk_clip=1e6), config=TrainerConfig()).train(some_batch(0))
    for name, weight in plain.named_weights().items():
        assert torch.equal(weight, bounded.named_weights()[name])
