"""The clamp of gradients: its bound is the histogram's of the step before, however the batch was cut, and it stops a spike."""

import asyncio

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.trainer.test_batch_gradient import FLAT, PROMPT, batched, packed
from tests.unit.trainer.test_policy_trainer import some_batch, trainer_of
from tests.unit.trainer.tiny import tiny

from everlong.contracts.records import TrainBatch
from everlong.contracts.tokens import TokenColumns
from everlong.storage import open_store
from everlong.trainer.clamp_config import HiddenClamp, WeightClamp
from everlong.trainer.config import AdamWConfig, TrainerConfig
from everlong.trainer.gradient_clamp import (
    NUM_BINS,
    HiddenGradientClamp,
    bounds_of,
    clamp_weights,
    histogram,
    layer_of,
)
from everlong.trainer.ranks.ranks import ALONE
from everlong.trainer.tally import Tally

# Weight gradients ----------------------------------------------------------------------------------------------------

ANCHOR = [0.1, -0.2, 0.3, 0.1, 0.0, 0.2, -0.1, 0.05, -50.0, 0.4]


def test_a_tenth_of_ten_elements_is_cut_to_the_next_and_too_small_a_share_cuts_nothing():
    for share, expected, cut in ((0.1, [*ANCHOR[:8], -0.4, 0.4], 1), (4e-7, ANCHOR, 0)):
        gradient = torch.tensor(ANCHOR)
        assert clamp_weights({"model.norm.weight": gradient}, [gradient], share, ALONE) == cut
        assert gradient.tolist() == pytest.approx(expected)


def test_the_elements_of_a_layer_are_ranked_together_and_apart_from_other_layers():
    names = [
        "model.embed_tokens.weight",
        "model.layers.0.a.weight",
        "model.layers.0.b.weight",
        "model.layers.1.a.weight",
    ]
    gradients = [torch.tensor(values) for values in ([9.0, 1.0], [[3.0], [-8.0]], [1.0, 2.0], [5.0, 6.0, 7.0, -8.0])]
    weights = dict(zip(names, [part.clone() for part in gradients], strict=True))
    assert clamp_weights(weights, [*gradients], 0.25, ALONE) == 2
    assert [part.flatten().tolist() for part in gradients] == [
        [9.0, 1.0],
        [3.0, -3.0],
        [1.0, 2.0],
        [5.0, 6.0, 7.0, -7.0],
    ]


def test_weights_are_told_apart_by_layer():
    assert layer_of("model.layers.11.mlp.up_proj.weight") == layer_of("model.layers.11.input_layernorm.weight")
    assert layer_of("model.layers.1.x") == "model.layers.1" and layer_of("lm_head.weight") == "lm_head.weight"


async def test_cut_weight_gradients_are_counted():
    config = TrainerConfig(gradient_clamp=WeightClamp(share=0.01))
    metrics = (await trainer_of(config=config).train(some_batch(0))).metrics
    assert metrics["clamp/clamped"] > 0


# Histogram and bound -------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(2.0**-90, 2.0**90, width=32), min_size=1, max_size=300),
    st.floats(0.001, 0.9),
)
def test_a_bound_lets_the_share_pass_and_lies_close_above_the_exact_one(sizes, share):
    (bound,) = bounds_of(histogram(torch.tensor(sizes))[None], share)
    allowed = int(share * len(sizes))
    if not allowed:
        assert bound == float("inf")
        return
    assert sum(size >= bound for size in sizes) <= allowed
    exact = sorted(sizes)[-allowed - 1]
    assert exact <= bound <= exact * (1 + 2**-4) + 1e-37


@given(st.lists(st.floats(0, 2.0**90, width=32), max_size=60), st.integers(0, 60))
def test_counts_of_the_parts_add_up_to_those_of_the_whole_and_zeros_are_none(sizes, cut):
    whole = histogram(torch.tensor(sizes))
    parts = histogram(torch.tensor(sizes[:cut])) + histogram(torch.tensor(sizes[cut:]))
    assert torch.equal(whole, parts) and whole.sum() == sum(size > 0 for size in sizes)
    assert len(whole) == NUM_BINS


def clamp_after(sizes, of="vectors", share=0.01):
    """One layer, whose step before had these."""
    clamp = HiddenGradientClamp(HiddenClamp(of=of, share=share), 1)
    clamp.load_state({"clamp/histogram": histogram(torch.tensor(sizes))[None]})
    return clamp


def backward_through(clamp, gradient):
    hidden = torch.zeros_like(gradient, requires_grad=True)
    clamp(0, hidden).backward(gradient)
    return hidden.grad


def test_a_long_vector_is_scaled_down_to_the_bound_and_keeps_its_direction():
    clamp = clamp_after([1.0] * 99 + [40.0])
    gradient = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    got = backward_through(clamp, gradient)
    bound = 1 + 2**-5
    torch.testing.assert_close(got, torch.tensor([[0.6 * bound, 0.8 * bound], [0.3, 0.4], [0.0, 0.0]]))


def test_elements_are_cut_one_by_one():
    got = backward_through(clamp_after([1.0] * 99 + [40.0], of="elements"), torch.tensor([[3.0, -0.5, -7.0]]))
    assert got.tolist() == [[1 + 2**-5, -0.5, -1 - 2**-5]]


@pytest.mark.parametrize("of", ["vectors", "elements"])
def test_what_is_infinite_stays_so_that_the_step_is_refused(of):
    got = backward_through(clamp_after([1.0] * 99 + [40.0], of=of), torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0]]))
    assert not got.isfinite().all(-1).any()


def test_norms_are_counted_before_they_are_clamped():
    clamp, tally = clamp_after([1.0] * 99 + [40.0]), Tally()
    backward_through(clamp, torch.tensor([[30.0, 40.0], [0.0, 0.0], [0.6, 0.8]]))
    clamp.close_step(ALONE, tally)
    metrics = tally.metrics()
    assert (metrics["clamp/clamped"], metrics["clamp/share"], metrics["clamp/bounded_layers"]) == (1, 0.5, 1)
    assert 50 <= metrics["clamp/highest"] <= 50 * (1 + 2**-5)
    assert int(clamp.state()["clamp/histogram"].sum()) == 2
    # of two vectors 1 % is none
    torch.testing.assert_close(backward_through(clamp, torch.tensor([[30.0, 40.0]])), torch.tensor([[30.0, 40.0]]))


def test_a_spike_is_stopped_before_the_layers_below_amplify_it():
    """Of two layers that each make a gradient ten times as long, the lower one's weights feel 10 bounds instead of 10 spikes; to cut
    the weights' gradient afterwards needs to know which of them are a spike's."""
    amplify = 10 * torch.eye(2)

    def weight_gradient(clamp):
        weight = torch.eye(2, requires_grad=True)
        hidden = torch.ones(1, 2) @ weight
        hidden = clamp(0, hidden @ amplify) if clamp else hidden @ amplify
        (hidden @ torch.tensor([[30.0], [40.0]])).sum().backward()
        return float(weight.grad.norm())

    assert weight_gradient(None) == pytest.approx(500 * 2**0.5)
    assert weight_gradient(clamp_after([1.0] * 99 + [40.0])) == pytest.approx(10 * (1 + 2**-5) * 2**0.5)


# In the trainer ------------------------------------------------------------------------------------------------------


def of_trainer(model=None, share=0.2, of="vectors", **more):
    config = TrainerConfig(gradient_clamp=HiddenClamp(of=of, share=share))
    return trainer_of(model, config=config, optimizer=AdamWConfig(learning_rate=1e-3), **more)


def numbered(batch, number):
    return msgspec.structs.replace(batch, batch=number)


@pytest.mark.parametrize("of", ["vectors", "elements"])
async def test_the_first_step_is_free_and_the_second_is_clamped_by_its_histogram(of):
    clamped, free = tiny(), tiny()
    one = of_trainer(clamped, of=of)
    other = trainer_of(free, optimizer=AdamWConfig(learning_rate=1e-3))
    first = (await one.train(some_batch(0))).metrics
    await other.train(some_batch(0))
    same = all(torch.equal(weight, free.named_weights()[name]) for name, weight in clamped.named_weights().items())
    assert same and (first["clamp/clamped"], first["clamp/bounded_layers"]) == (0, 0)
    second = (await one.train(some_batch(1))).metrics
    expected = (await other.train(some_batch(1))).metrics
    assert second["clamp/clamped"] > 0 and second["clamp/bounded_layers"] == 2
    assert second["grad_norm"] != expected["grad_norm"]
    assert not [name for name in expected if name.startswith("clamp")]


async def test_bounds_and_clamped_gradients_do_not_depend_on_how_the_batch_is_cut():
    """Rows that are packed in one micro-batch or in three."""
    pieces = [
        (-1, -1, PROMPT),
        (0, 0, FLAT[0].columns.slice(3, 8)),
        (-1, -1, PROMPT),
        (2, 1, TokenColumns.supervised([7, 7, 1])),
    ]
    together = batched(packed(*pieces), counts=(5, 3))
    apart = batched(packed(*pieces[:2]), packed((-1, -1, PROMPT), (0, 1, pieces[3][2])), counts=(5, 3))
    found = []
    for cut in (together, apart):
        trainer = of_trainer()
        await trainer.train(cut)
        second = await trainer.train(numbered(cut, 1))
        found.append((trainer._clamp.state()["clamp/histogram"], trainer._clamp._bounds, second.metrics))
    (counts, bounds, metrics), (others, other_bounds, other_metrics) = found
    assert int(counts.sum()) == int(others.sum()) > 10
    # a norm at the edge of a bin may fall to either side by its last bit
    assert int((counts - others).abs().sum()) <= 2
    assert bounds == pytest.approx(other_bounds, rel=0.05)
    assert metrics["clamp/clamped"] == other_metrics["clamp/clamped"] > 0
    assert metrics["grad_norm"] == pytest.approx(other_metrics["grad_norm"], rel=1e-4)


async def test_a_restored_trainer_clamps_as_the_undisturbed_one():
    store = open_store("memory://")
    trainer = of_trainer(store=store)
    for number in range(2):
        await trainer.train(some_batch(number))
    await trainer.save()
    undisturbed = (await trainer.train(some_batch(2))).metrics
    again = of_trainer(store=store)
    await again.restore()
    metrics = (await again.train(some_batch(2))).metrics
    assert metrics["clamp/clamped"] == undisturbed["clamp/clamped"] > 0
    assert metrics["grad_norm"] == undisturbed["grad_norm"]
    empty = of_trainer(store=open_store("memory://"))
    await empty.train(some_batch(0))
    await empty.restore()
    assert (await empty.train(some_batch(0))).metrics["clamp/bounded_layers"] == 0


def test_a_checkpoint_without_histogram_is_refused():
    store = open_store("memory://")
    asyncio.run(trainer_of(store=store).save())
    with pytest.raises(ValueError, match="holds no histogram"):
        asyncio.run(of_trainer(store=store).restore())


async def test_a_batch_without_trained_tokens_leaves_the_histogram():
    trainer = of_trainer()
    await trainer.train(some_batch(0))
    before = trainer._clamp.state()["clamp/histogram"].clone()
    await trainer.train(TrainBatch(batch=1, micro_batches=(), episodes=()))
    assert torch.equal(before, trainer._clamp.state()["clamp/histogram"]) and int(before.sum()) > 0
