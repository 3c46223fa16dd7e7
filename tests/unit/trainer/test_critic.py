"""The critic on a tiny llama: what its values see, its gradient against an independent float64 reference, its place in a run."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.trainer.test_batch_gradient import PROMPT, batched, packed, reference_hidden
from tests.unit.trainer.tiny import SHAPE, tiny

from everlong.contracts.errors import AlreadyExists
from everlong.contracts.records import ScoreRequest
from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.models.adapter_config import LoraConfig
from everlong.models.value_network import ValueNetwork
from everlong.storage import open_store
from everlong.trainer.config import (
    AdamWConfig,
    BoundedHead,
    CriticConfig,
    LinearHead,
    PpoConfig,
    RatioConfig,
    TrainerConfig,
)
from everlong.trainer.critic import value_gradient
from everlong.trainer.objective import Objective
from everlong.trainer.preparation import prepare_batch
from everlong.trainer.trainer import PolicyTrainer
from everlong.weights import WeightPublisher

OBJECTIVE = Objective(PpoConfig(), RatioConfig())
TOOL = TokenColumns.context([6, 6])


def sampled(ids, returns, credit=0.5, kept=None):
    columns = TokenColumns.sampled_tokens(ids, [-2.0] * len(ids), version=0, kept=kept).with_credit(credit)
    return columns.replace(returns=np.array(returns, np.float32))


SHARED = sampled([2, 3], [0.3, 0.4])
LEFT = sampled([4, 8, 5], [1.0, 0.9, 0.8], kept=KeptSets.from_rows([[1, 4, 7], [], [5]]))
RIGHT = sampled([5, 6], [-0.5, -0.25], credit=-1.0)
OTHER = sampled([7, 1], [0.125, 0.75])
TREE = batched(
    packed((-1, -1, PROMPT), (0, 0, SHARED + TOOL), (1, 0, LEFT), (1, 0, RIGHT), (0, 1, OTHER)), counts=(7, 2)
)
FLAT = batched(
    packed((-1, -1, PROMPT), (0, 0, SHARED + TOOL + LEFT)),
    packed((-1, -1, PROMPT), (0, 0, (SHARED + TOOL).freeze().with_credit(None) + RIGHT)),
    packed((-1, -1, PROMPT), (0, 1, OTHER)),
    counts=(7, 2),
)
ROWS = [
    (PROMPT + SHARED + TOOL + LEFT, [3, 4, 7, 8, 9]),
    (PROMPT + SHARED + TOOL + RIGHT, [7, 8]),
    (PROMPT + OTHER, [3, 4]),
]
"""Whole branches, and which of their tokens train there."""


def network_of(model, bounds=None):
    """With a head that says something."""
    network = ValueNetwork(model, initial=0.2, bounds=bounds)
    with torch.no_grad():
        weight = network.trained_weights()["value_head.weight"]
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return network


def trainer_of(model=None, *, store=None, critic=None, rate=1e-2, keep=2, updates=1):
    model, store = model or tiny(), store or open_store("memory://")
    return PolicyTrainer(
        model,
        config=TrainerConfig(checkpoint_keep=keep, updates_per_batch=updates),
        loss=PpoConfig(),
        ratio=RatioConfig(),
        optimizer=AdamWConfig(learning_rate=rate),
        critic=critic,
        numerics=model.numerics,
        store=store,
        publisher=WeightPublisher(store, anchor_every=10),
        seed=7,
        lease=asyncio.Lock(),
    )


def some_batch(number, returns=(0.0, 1.0)):
    rng = np.random.default_rng(number)
    answers = [sampled(rng.integers(0, 11, 4), [value] * 4, credit=value - 0.5) for value in returns]
    pieces = [(0, i, answer) for i, answer in enumerate(answers)]
    batch = batched(packed((-1, -1, PROMPT), *pieces), counts=(4,) * len(answers))
    return type(batch)(batch=number, micro_batches=batch.micro_batches, episodes=batch.episodes)


def supervised_batch(number):
    batch = batched(packed((-1, -1, PROMPT), (0, 0, TokenColumns.supervised([7, 7]))), counts=(2,))
    return type(batch)(batch=number, micro_batches=batch.micro_batches, episodes=batch.episodes)


def copied(tensors):
    return {name: value.detach().clone() for name, value in tensors.items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


async def values_of(trainer, batch):
    scores = await trainer.score(ScoreRequest(micro_batches=batch.micro_batches, wanted=("values",)))
    assert scores.logprobs is None
    return scores.values[0], scores.values_after[0]


async def warm(trainer, *numbers):
    """So that its values differ from state to state."""
    for number in numbers:
        await trainer.train(some_batch(number))


# What a value sees ---------------------------------------------------------------------------------------------------


async def test_a_value_has_not_seen_its_token():
    trainer = trainer_of(critic=CriticConfig(learning_rate=0.1))
    await warm(trainer, 0, 1, 2)
    first, second = (batched(packed((-1, -1, PROMPT), (0, 0, sampled([2, id, 9], [0.0] * 3))), counts=(3,)) for id in (3, 8))  # fmt: skip
    (before, after), (before_other, after_other) = await values_of(trainer, first), await values_of(trainer, second)
    np.testing.assert_array_equal(before[3:5], before_other[3:5])  # the token that differs is at 4
    assert before[5] != before_other[5] and after[4] != after_other[4]
    np.testing.assert_array_equal(after[3], before[4])
    assert np.isnan(before[:3]).all() and np.isnan(after[:3]).all()


async def test_what_nobody_asked_for_or_has_is_absent():
    batch = some_batch(0)
    plain = await trainer_of().score(ScoreRequest(micro_batches=batch.micro_batches, wanted=("logprobs", "values")))
    assert plain.values is None and plain.values_after is None and plain.logprobs is not None


async def test_tools_and_siblings_have_no_value_and_siblings_do_not_show():
    trainer = trainer_of(critic=CriticConfig(learning_rate=0.1))
    await warm(trainer, 0, 1)
    tree, _ = await values_of(trainer, TREE)
    flat = (await trainer.score(ScoreRequest(micro_batches=FLAT.micro_batches, wanted=("values",)))).values
    assert np.isnan(tree[5:7]).all(), "the tool's tokens"
    np.testing.assert_allclose(tree[7:10], flat[0][7:10], atol=1e-6)
    np.testing.assert_allclose(tree[10:12], flat[1][7:9], atol=1e-6)
    np.testing.assert_allclose(tree[12:14], flat[2][3:5], atol=1e-6)


# The gradient --------------------------------------------------------------------------------------------------------


def distance(got, expected):
    """Norm of the difference by the norm of what was expected, over all tensors."""
    got, expected = (torch.cat([part.double().flatten() for part in parts]) for parts in (got, expected))
    return float((got - expected).norm() / expected.norm())


def reference_loss(weights, rows, bounds):
    total, count = torch.zeros((), dtype=torch.float64), 0
    for columns, trained in rows:
        hidden = reference_hidden(weights, torch.from_numpy(columns.ids.astype(np.int64)))
        values = hidden @ weights["value_head.weight"] + weights["value_head.bias"]
        if bounds is not None:
            values = bounds[0] + (bounds[1] - bounds[0]) / (1 + torch.exp(-values))
        for token in trained:
            total = total + (values[token - 1] - float(columns.returns[token])) ** 2 / 2
            count += 1
    return total / count


@pytest.mark.parametrize("bounds", [None, (-1.0, 2.0)], ids=["linear", "bounded"])
@pytest.mark.parametrize("batch", [TREE, FLAT], ids=["tree", "flat"])
def test_loss_and_gradient_equal_an_independent_reference(batch, bounds):
    network = network_of(tiny(), bounds)
    weights = {name: w.detach().double().requires_grad_() for name, w in network.trained_weights().items()}
    expected = reference_loss(weights, ROWS, bounds)
    gradients = torch.autograd.grad(expected, list(weights.values()))
    got = value_gradient(network, prepare_batch(batch, OBJECTIVE, SHAPE))
    assert got.loss == pytest.approx(float(expected.detach()), rel=1e-6)
    assert distance(got.gradient, gradients) < 1e-5


ANSWERS = [sampled([i, (3 * i + 1) % 11, 4], [0.1 * i, 0.5, -0.25 * i]) for i in range(5)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(homes):
    """Each answer trains in one of up to four micro-batches; its siblings may stand there too, frozen."""
    network = network_of(tiny())
    micro_batches = []
    for home in sorted(set(homes)):
        pieces = [
            (0, i, answer if homes[i] == home else answer.freeze().with_credit(None))
            for i, answer in enumerate(ANSWERS)
        ]
        micro_batches.append(packed((-1, -1, PROMPT), *pieces))
    whole = batched(packed((-1, -1, PROMPT), *((0, i, a) for i, a in enumerate(ANSWERS))), counts=(3,) * 5)
    cut = batched(*micro_batches, counts=(3,) * 5)
    expected, got = (value_gradient(network, prepare_batch(batch, OBJECTIVE, SHAPE)) for batch in (whole, cut))
    assert got.loss == pytest.approx(expected.loss, rel=1e-6)
    assert distance(got.gradient, expected.gradient) < 1e-5


# In a run ------------------------------------------------------------------------------------------------------------


async def test_explained_variance_speaks_of_what_was_not_yet_learnt():
    trainer = trainer_of(critic=CriticConfig(learning_rate=1e-2, updates_per_batch=4), rate=1e-9)
    metrics = [(await trainer.train(same_answers(number))).metrics for number in range(30)]
    assert metrics[0]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6), (
        "one value for every state explains nothing"
    )
    assert metrics[0]["critic/value"] == 0.0 and metrics[0]["critic/value_variance"] == 0.0
    before, _ = await values_of(trainer, same_answers(30))
    last = (await trainer.train(same_answers(30))).metrics
    returns = same_answers(30).micro_batches[0].columns.returns
    trained = np.isfinite(returns)
    explained = 1 - np.var((returns - before)[trained]) / np.var(returns[trained])
    assert last["critic/explained_variance"] == pytest.approx(explained, abs=1e-5) and explained > 0.5
    assert last["critic/loss"] == pytest.approx(1 / 24, abs=2e-3), "before its first token an answer may end either way"


def same_answers(number):
    """The first token, chosen freely, says how it ends."""
    good, bad = sampled([2, 3, 3], [1.0] * 3), sampled([5, 3, 3], [0.0] * 3)
    batch = batched(packed((-1, -1, PROMPT), (0, 0, good), (0, 1, bad)), counts=(3, 3))
    return type(batch)(batch=number, micro_batches=batch.micro_batches, episodes=batch.episodes)


async def test_where_all_returns_are_one_no_variance_is_explained_and_none_is_reported():
    metrics = (await trainer_of(critic=CriticConfig()).train(some_batch(0, returns=(1.0, 1.0)))).metrics
    assert "critic/explained_variance" not in metrics and "critic/loss" in metrics


async def test_the_critic_steps_as_often_as_it_is_told_whatever_the_policy_does():
    trainer = trainer_of(critic=CriticConfig(updates_per_batch=3))
    report = await trainer.train(some_batch(0))
    assert report.num_updates == 1 and report.metrics["critic/updates"] == 3
    steps = {int(value) for name, value in trainer._critic.state().items() if name.startswith("critic/step/")}
    assert steps == {3}


async def test_before_its_time_the_policy_stays_as_it_is():
    model = tiny()
    trainer = trainer_of(model, critic=CriticConfig(pretrain_batches=2))
    await trainer.train(supervised_batch(0))  # a warm-up is no part of it
    before, optimizer = copied(model.named_weights()), copied(trainer._optimizer.state())
    for number in (1, 2):
        report = await trainer.train(some_batch(number))
        assert report.num_updates == 0 and report.policy_version == number + 1
        assert report.metrics["critic/updates"] == 2
        assert same(before, copied(model.named_weights())) and same(optimizer, copied(trainer._optimizer.state()))
    assert (await trainer.train(some_batch(3))).num_updates == 1
    assert not same(before, copied(model.named_weights()))


async def test_the_trunk_begins_as_the_policy_after_its_warm_up():
    model = tiny()
    trainer = trainer_of(model, critic=CriticConfig(head=LinearHead(initial=0.25)))
    for number in range(3):
        await trainer.train(supervised_batch(number))
    before, _ = await values_of(trainer, some_batch(3))
    assert set(before[np.isfinite(before)].tolist()) == {0.25}
    assert same(copied(trainer._critic.network.trunk.named_weights()), copied(model.named_weights()))
    await trainer.train(some_batch(3))
    assert not same(copied(trainer._critic.network.trunk.named_weights()), copied(model.named_weights()))


async def test_the_learning_rate_grows_from_the_critic_s_first_step():
    """It makes two steps a batch, and the metric is of the last."""
    trainer = trainer_of(critic=CriticConfig(learning_rate=0.4, warmup_steps=4))
    await trainer.train(supervised_batch(0))
    rates = [(await trainer.train(some_batch(number))).metrics["critic/learning_rate"] for number in (1, 2, 3)]
    assert rates == pytest.approx([0.2, 0.4, 0.4])


async def test_supervised_batches_and_empty_ones_teach_it_nothing():
    trainer = trainer_of(critic=CriticConfig())
    await trainer.train(some_batch(0))
    before = copied(trainer._critic.state())
    report = await trainer.train(supervised_batch(1))
    assert not any(name.startswith("critic/") for name in report.metrics)
    await trainer.train(type(some_batch(2))(batch=2, micro_batches=(), episodes=()))
    assert same(before, copied(trainer._critic.state()))


async def test_bounds_hold_every_value_and_refuse_a_return_beyond_them():
    trainer = trainer_of(
        critic=CriticConfig(head=BoundedHead(low=0.0, high=1.0), learning_rate=0.5, updates_per_batch=8)
    )
    assert set((await values_of(trainer, some_batch(0)))[0][3:].tolist()) == {0.5}
    await warm(trainer, 0, 1, 2)
    values, _ = await values_of(trainer, some_batch(3))
    assert (values[3:] >= 0).all() and (values[3:] <= 1).all() and np.ptp(values[3:]) > 0.1
    with pytest.raises(ValueError, match=r"from -0.5 to 1, the critic's head from 0.0 to 1.0: set critic.head.low"):
        await trainer.train(some_batch(3, returns=(-0.5, 1.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_adapters_of_its_own_beside_the_same_frozen_weights(dtype):
    model = tiny(dtype)
    model.adapt(LoraConfig(rank=2))
    frozen = copied(model.named_weights())
    trainer = trainer_of(model, critic=CriticConfig(learning_rate=1e-2), rate=1e-9)
    own = copied(model.trained_weights())
    await warm(trainer, 0, 1)
    trunk = trainer._critic.network.trunk
    assert all(mine is theirs for mine, theirs in zip(trunk._weights, model._weights, strict=True)), "no second copy"
    assert same(frozen, copied(model.named_weights()))
    assert not same(own, copied(trunk.trained_weights()))
    for name, weight in model.trained_weights().items():
        torch.testing.assert_close(weight.detach(), own[name], rtol=0, atol=1e-7)


# What is refused -----------------------------------------------------------------------------------------------------


async def test_a_batch_without_returns_is_refused_and_changes_nothing():
    model = tiny()
    trainer = trainer_of(model, critic=CriticConfig())
    before = copied(model.named_weights())
    bare = batched(packed((-1, -1, PROMPT), (0, 0, TokenColumns.sampled_tokens([2, 3], [-1.0] * 2, version=0).with_credit(0.5))), counts=(2,))  # fmt: skip
    with pytest.raises(ValueError, match="2 sampled tokens have no return for the critic"):
        await trainer.train(bare)
    assert same(before, copied(model.named_weights()))


async def test_returns_that_no_critic_reads_are_refused():
    with pytest.raises(ValueError, match="returns for a critic, and this trainer has none"):
        await trainer_of().train(some_batch(0))


# Checkpoints ---------------------------------------------------------------------------------------------------------


async def test_a_restored_critic_goes_on_with_the_same_bits():
    store, settings = open_store("memory://"), CriticConfig(pretrain_batches=2, updates_per_batch=2, warmup_steps=3)
    trainer = trainer_of(store=store, critic=settings)
    await warm(trainer, 0)
    await trainer.save()
    await warm(trainer, 1, 2, 3)
    again = trainer_of(store=store, critic=settings)
    await again.restore()
    await warm(again, 1, 2, 3)
    assert same(copied(trainer._critic.state()), copied(again._critic.state()))
    assert same(copied(trainer._optimizer.state()), copied(again._optimizer.state()))
    first, second = await values_of(trainer, some_batch(4)), await values_of(again, some_batch(4))
    np.testing.assert_array_equal(first, second)


async def test_a_critic_that_came_out_different_is_noticed_while_the_policy_waits():
    store, settings = open_store("memory://"), CriticConfig(pretrain_batches=5)
    trainer = trainer_of(store=store, critic=settings)
    await warm(trainer, 0)
    await trainer.save()
    await trainer.save()  # the same one is left as it is
    other = trainer_of(store=store, critic=settings)
    batch = some_batch(5)
    await other.train(type(batch)(batch=0, micro_batches=batch.micro_batches, episodes=batch.episodes))
    with pytest.raises(AlreadyExists, match="checkpoint 1 holds a critic .* came out different"):
        await other.save()


async def test_without_a_checkpoint_the_critic_starts_anew():
    trainer = trainer_of(critic=CriticConfig())
    await warm(trainer, 0, 1)
    reached = copied(trainer._critic.state())
    await trainer.restore()
    await warm(trainer, 0, 1)
    assert same(reached, copied(trainer._critic.state()))


async def test_a_checkpoint_of_a_warm_up_holds_a_critic_that_has_not_begun():
    store = open_store("memory://")
    trainer = trainer_of(store=store, critic=CriticConfig())
    await trainer.train(supervised_batch(0))
    await trainer.save()
    await trainer.train(some_batch(1))
    again = trainer_of(store=store, critic=CriticConfig())
    await again.restore()
    await again.train(some_batch(1))
    assert same(copied(trainer._critic.state()), copied(again._critic.state()))


@pytest.mark.parametrize(("saved", "restored", "message"), [(None, CriticConfig(), "holds no critic"), (CriticConfig(), None, "of another model or another optimiser")])  # fmt: skip
async def test_a_checkpoint_with_or_without_critic_is_refused_by_the_other(saved, restored, message):
    store = open_store("memory://")
    await trainer_of(store=store, critic=saved).save()
    with pytest.raises(ValueError, match=message):
        await trainer_of(store=store, critic=restored).restore()
