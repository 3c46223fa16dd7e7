"""The pull to a reference policy, and batches whose tokens are old, through the trainer's port."""

import asyncio

import numpy as np
import pytest
import torch
from tests.unit.trainer.tiny import tiny

from everlong.contracts.records import EpisodeShare, MicroBatch, Segment, TrainBatch
from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.storage import open_store
from everlong.trainer.config import (
    AdamWConfig,
    GrpoConfig,
    KlLoss,
    KlReward,
    RatioConfig,
    ReinforceConfig,
    SapoConfig,
    TokenMask,
    TrainerConfig,
)
from everlong.trainer.kl_config import WITHOUT_KL
from everlong.trainer.reference import KEY, ReferencePolicy
from everlong.trainer.trainer import PolicyTrainer
from everlong.weights import WeightPublisher

PROMPT = TokenColumns.context([3, 9, 2])


def trainer_of(model=None, *, kl=WITHOUT_KL, loss=None, ratio=None, updates=1, store=None, rate=1e-2):
    model, store = model or tiny(), store or open_store("memory://")
    return PolicyTrainer(
        model, config=TrainerConfig(updates_per_batch=updates), loss=loss or SapoConfig(), ratio=ratio or RatioConfig(),
        kl=kl, optimizer=AdamWConfig(learning_rate=rate), numerics=model.numerics, store=store,
        publisher=WeightPublisher(store, anchor_every=10), seed=7, lease=asyncio.Lock(),
    )  # fmt: skip


def batch_of(number, *answers):
    segments, at = [Segment(parent=-1, start=0, length=len(PROMPT), episode=-1)], len(PROMPT)
    for index, answer in enumerate(answers):
        segments.append(Segment(parent=0, start=at, length=len(answer), episode=index))
        at += len(answer)
    shares = tuple(EpisodeShare(episode=f"e{i}", group=0, num_trainable=a.num_trainable) for i, a in enumerate(answers))
    micro_batch = MicroBatch(columns=TokenColumns.join([PROMPT, *answers]), segments=tuple(segments))
    return TrainBatch(batch=number, micro_batches=(micro_batch,), episodes=shares)


def answer(seed, credit, versions=0, kept=None):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 11, 5)
    kept = None if kept is None else KeptSets.from_rows([sorted({int(i), *rng.integers(0, 11, kept)}) for i in ids])
    logprobs = -rng.random(5).astype(np.float32) * 2
    return TokenColumns.sampled_tokens(ids, logprobs, version=versions, kept=kept).with_credit(credit)


def weights_of(model):
    return {name: weight.detach().clone() for name, weight in model.named_weights().items()}


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


def test_asking_the_reference_leaves_the_weights_to_the_bit():
    model, store = tiny(), open_store("memory://")
    reference, first = ReferencePolicy(model, store), weights_of(model)
    reference.ask(lambda: None)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.25)
    moved = weights_of(model)
    for _ in range(2):
        assert same(reference.ask(lambda: weights_of(model)), first)
        assert same(weights_of(model), moved)
    with pytest.raises(ZeroDivisionError):
        reference.ask(lambda: 1 / 0)
    assert same(weights_of(model), moved)
    assert same(ReferencePolicy(model, store).ask(lambda: weights_of(model)), first)


def test_a_reference_of_another_model_is_refused():
    store = open_store("memory://")
    ReferencePolicy(tiny(), store).ask(lambda: None)
    with pytest.raises(ValueError, match=f"{KEY} is of another model"):
        ReferencePolicy(tiny(torch.bfloat16), store).ask(lambda: None)


async def test_the_reference_is_the_policy_before_the_first_sampled_batch():
    """Supervised batches come before it and do not feel it."""
    kl, store, model = KlLoss(coefficient=0.5), open_store("memory://"), tiny()
    trainer = trainer_of(model, kl=kl, store=store)
    metrics = (await trainer.train(batch_of(0, TokenColumns.supervised([5, 6])))).metrics
    assert "kl" not in metrics and not store.list("reference")
    taught = weights_of(model)
    assert (await trainer.train(batch_of(1, answer(1, 1.0)))).metrics["kl"] == 0.0
    assert same(ReferencePolicy(model, store).ask(lambda: weights_of(model)), taught)
    assert (await trainer.train(batch_of(2, answer(1, 1.0)))).metrics["kl"] > 0.0


@pytest.mark.parametrize("kl", [KlLoss(coefficient=0.5), KlReward(coefficient=0.5)], ids=lambda kl: kl.type)
async def test_training_goes_on_bit_for_bit_after_a_restore(kl):
    undisturbed = trainer_of(kl=kl)
    for number in range(4):
        await undisturbed.train(batch_of(number, answer(number, 1.0), answer(9, -0.5)))
    store = open_store("memory://")
    first = trainer_of(kl=kl, store=store)
    for number in range(2):
        await first.train(batch_of(number, answer(number, 1.0), answer(9, -0.5)))
    await first.save()
    second = trainer_of(kl=kl, store=store)
    await second.restore()
    for number in range(2, 4):
        await second.train(batch_of(number, answer(number, 1.0), answer(9, -0.5)))
    assert await second.save() == await undisturbed.save()


@pytest.mark.parametrize("estimator", ["k2", "k3", "unbiased"])
async def test_a_step_with_the_kl_term_alone_lowers_the_kl(estimator):
    """Without credit nothing else has a gradient, apart from SAPO's 0."""
    trainer = trainer_of(kl=KlLoss(estimator=estimator, coefficient=1.0), rate=1e-3)
    await trainer.train(batch_of(0, answer(0, 0.0)))
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for master in trainer._optimizer._masters.values():
            master.add_(torch.randn(master.shape, generator=generator) * 0.05)
    kls = [(await trainer.train(batch_of(number, answer(0, 0.0)))).metrics["kl"] for number in range(1, 6)]
    assert kls == sorted(kls, reverse=True)
    assert kls[0] > kls[-1] > 0


async def test_the_support_is_one_on_both_sides():
    """Of equal policies the KL is 0 over the kept set and over the vocabulary; of others it differs."""
    values = {}
    for support in ("kept", "full"):
        trainer = trainer_of(kl=KlLoss(support=support, estimator="k2"))
        answers = [answer(0, 1.0, kept=3), answer(1, -1.0, kept=2)]
        assert (await trainer.train(batch_of(0, *answers))).metrics["kl"] == 0.0
        values[support] = (await trainer.train(batch_of(1, *answers))).metrics["kl"]
    assert values["kept"] > 0 < values["full"]
    assert values["kept"] != pytest.approx(values["full"], rel=1e-3)


async def test_a_reward_of_nats_is_that_of_the_policy_before_the_updates():
    trainer = trainer_of(kl=KlReward(coefficient=1.0), updates=3, rate=0.05)
    assert (await trainer.train(batch_of(0, answer(0, 1.0)))).metrics["kl"] == 0.0


# Old tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "ratio", "updates"),
    [(ReinforceConfig(), RatioConfig(), 1), (GrpoConfig(), RatioConfig(base="proximal"), 2)],
    ids=["reinforce", "proximal"],
)
async def test_old_tokens_without_correction_are_refused_before_anything_is_changed(loss, ratio, updates):
    model = tiny()
    trainer = trainer_of(model, loss=loss, ratio=ratio, updates=updates)
    await trainer.train(batch_of(0, answer(0, 1.0)))
    before = weights_of(model)
    with pytest.raises(
        ValueError, match=r"batch 1 holds tokens that are 1 policy versions old, and .*: set ratio.corr"
    ):
        await trainer.train(batch_of(1, answer(0, 1.0, versions=[1, 1, 0, 1, 1])))
    assert same(before, weights_of(model))
    await trainer.train(batch_of(1, answer(0, 1.0, versions=1)))


@pytest.mark.parametrize(
    ("loss", "ratio", "updates"),
    [
        (ReinforceConfig(), RatioConfig(correction=TokenMask()), 1),
        (GrpoConfig(), RatioConfig(base="proximal", correction=TokenMask()), 2),
        (GrpoConfig(), RatioConfig(), 1),
    ],
    ids=["reinforce", "proximal", "behaviour"],
)
async def test_old_tokens_that_are_weighed_train(loss, ratio, updates):
    trainer = trainer_of(loss=loss, ratio=ratio, updates=updates)
    await trainer.train(batch_of(0, answer(0, 1.0)))
    assert (await trainer.train(batch_of(1, answer(0, 1.0)))).num_updates == updates


async def test_staleness_is_judged_token_by_token():
    """Of ten tokens one is of version 3 and nine of version 5, now at 6: the newest would say 1 and the oldest 3."""
    trainer = trainer_of()
    for number in range(6):
        await trainer.train(batch_of(number, answer(number, 1.0, versions=number)))
    mixed = answer(7, 1.0, versions=[3, 5, 5, 5, 5])
    metrics = (await trainer.train(batch_of(6, mixed, answer(8, 1.0, versions=5)))).metrics
    assert (metrics["staleness/max"], metrics["staleness/mean"]) == (3, pytest.approx(1.2))
