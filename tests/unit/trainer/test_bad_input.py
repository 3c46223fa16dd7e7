"""A record that cannot be trained is refused before anything is changed; one in which nothing trains is counted. Never NaN."""

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
    CriticConfig,
    GrpoConfig,
    GspoConfig,
    KlLoss,
    MisPo,
    RatioConfig,
    ReinforceConfig,
    SapoConfig,
    TokenMask,
    TrainerConfig,
)
from everlong.trainer.kl_config import WITHOUT_KL
from everlong.trainer.trainer import PolicyTrainer
from everlong.weights import WeightPublisher

KEPT = KeptSets.from_rows([[4, 7], [1, 5]])
GOOD = TokenColumns.sampled_tokens([4, 5], [-0.7, -0.6], version=0, kept=KEPT).with_credit(1.0)
PROMPT = TokenColumns.context([3, 9, 2])


def trainer_of(store, loss=None, ratio=None, kl=WITHOUT_KL, critic=None):
    model = tiny()
    return model, PolicyTrainer(
        model, config=TrainerConfig(), loss=loss or SapoConfig(), ratio=ratio or RatioConfig(), kl=kl, critic=critic,
        optimizer=AdamWConfig(learning_rate=1e-2), numerics=model.numerics, store=store,
        publisher=WeightPublisher(store, 10), seed=0, lease=asyncio.Lock(),
    )  # fmt: skip


def batch_of(*answers, number=0):
    """A micro-batch for each answer, so that what is wrong comes after something sound."""
    micro_batches, shares = [], []
    for index, answer in enumerate(answers):
        segments = (
            Segment(parent=-1, start=0, length=3, episode=-1),
            Segment(parent=0, start=3, length=len(answer), episode=index),
        )
        micro_batches.append(MicroBatch(columns=PROMPT + answer, segments=segments))
        num = int((answer.trainable & np.isfinite(answer.credit)).sum())
        shares.append(EpisodeShare(episode=f"e{index}", group=0, num_trainable=num))
    return TrainBatch(batch=number, micro_batches=tuple(micro_batches), episodes=tuple(shares))


def floats(*values):
    return np.array(values, np.float32)


REFUSED = {
    "logprob nan": ({"logprobs": floats(-0.7, np.nan)}, "token 4 of micro-batch 1 has logprob nan"),
    "logprob -inf": ({"logprobs": floats(-np.inf, -0.6)}, "token 3 of micro-batch 1 has logprob -inf"),
    "no temperature": ({"temperatures": floats(np.nan, 1)}, "temperature nan"),
    "temperature 0": ({"temperatures": floats(1, 0)}, "temperature 0"),
    "set without its token": (
        {"kept": KeptSets.from_rows([[4, 7], [1, 6]])},
        "kept set of token 4 of micro-batch 1 lacks the sampled id 5",
    ),
    "set that holds it twice": ({"kept": KeptSets.from_rows([[4, 4], [1, 5]])}, "kept set of token 3 of micro-batch 1"),
    "an id beyond the vocabulary": ({"ids": np.array([4, 11], np.int32), "kept": KeptSets.empty(2)}, "id 11"),
}


@pytest.mark.parametrize(("streams", "message"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_sampled_token_that_cannot_be_replayed_is_refused_and_nothing_is_changed(streams, message):
    store = open_store("memory://")
    model, trainer = trainer_of(store, kl=KlLoss())
    before = {name: weight.detach().clone() for name, weight in model.named_weights().items()}
    with pytest.raises(ValueError, match=message):
        await trainer.train(batch_of(GOOD, GOOD.replace(**streams)))
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_weights().items())
    assert store.list("") == [], "nor is there a reference yet"
    assert (await trainer.train(batch_of(GOOD, GOOD))).metrics["grad_norm"] > 0, "the batch is still the next one"


@pytest.mark.parametrize("streams", [streams for streams, _ in REFUSED.values() if "ids" not in streams], ids=str)
async def test_where_a_token_trains_nowhere_what_is_wrong_with_it_changes_no_bit(streams):
    _, sound = trainer_of(open_store("memory://"))
    _, broken = trainer_of(open_store("memory://"))
    ghost = GOOD.freeze()
    expected = (await sound.train(batch_of(GOOD, ghost))).metrics
    found = (await broken.train(batch_of(GOOD, ghost.replace(**streams)))).metrics
    assert (await broken.save()).fingerprint == (await sound.save()).fingerprint
    assert found["loss"] == expected["loss"]
    assert all(np.isfinite(value) for value in found.values())


async def test_credit_that_is_no_number_trains_nowhere_and_must_be_so_counted():
    _, trainer = trainer_of(open_store("memory://"))
    for value in (np.nan, np.inf):
        torn = batch_of(GOOD, GOOD.replace(credit=floats(1.0, value)))
        shares = (torn.episodes[0], EpisodeShare(episode="e1", group=0, num_trainable=2))
        with pytest.raises(ValueError, match="episode e1 of batch 0 says 2 trainable tokens, its columns hold 1"):
            await trainer.train(TrainBatch(batch=0, micro_batches=torn.micro_batches, episodes=shares))
    metrics = (await trainer.train(torn)).metrics
    assert metrics["tokens/trained"] == 3 and np.isfinite(metrics["loss"])


NOTHING = {
    "no micro-batch": TrainBatch(batch=0, micro_batches=(), episodes=()),
    "all masked": batch_of(GOOD.freeze(), GOOD.freeze()),
    "no verdict": batch_of(GOOD.with_credit(None)),
    "masked, and no logprob is a number": batch_of(GOOD.freeze().replace(logprobs=floats(np.nan, -np.inf))),
}


@pytest.mark.parametrize("batch", NOTHING.values(), ids=NOTHING.keys())
@pytest.mark.parametrize("parts", [{}, {"kl": KlLoss()}, {"critic": CriticConfig()}], ids=["alone", "kl", "critic"])
async def test_a_batch_in_which_nothing_trains_is_counted_and_changes_no_weight(batch, parts):
    _, trainer = trainer_of(open_store("memory://"), **parts)
    before = (await trainer.save()).fingerprint
    report = await trainer.train(batch)
    assert (report.metrics["batches_without_tokens"], report.metrics["loss"], report.num_updates) == (1, 0.0, 0)
    assert (report.policy_version, (await trainer.save()).fingerprint) == (1, before)


@pytest.mark.parametrize(
    ("loss", "ratio"),
    [
        (ReinforceConfig(), RatioConfig(correction=TokenMask(low=0.99, high=1.01))),
        (ReinforceConfig(), RatioConfig(correction=MisPo(sequence_low=0.999))),
        (GrpoConfig(), RatioConfig(off_policy_drop=0.0)),
        (GspoConfig(), RatioConfig(off_policy_drop=0.0)),
    ],
    ids=["token mask", "mis_po", "off policy", "off policy, branches"],
)
async def test_a_batch_that_a_filter_rejects_whole_has_a_gradient_of_0_and_says_so(loss, ratio):
    far = GOOD.replace(logprobs=floats(-1e-3, -1e-3)).with_credit(-1.0)
    _, trainer = trainer_of(open_store("memory://"), loss=loss, ratio=ratio)
    before = (await trainer.save()).fingerprint
    metrics = (await trainer.train(batch_of(far, far))).metrics
    assert (metrics["grad_norm"], metrics["loss"], metrics["correction/rejected"]) == (0.0, 0.0, 1.0)
    assert metrics["tokens/trained"] == 4, "they stay in the denominator"
    assert (await trainer.save()).fingerprint == before


@pytest.mark.parametrize("loss", [SapoConfig(), GspoConfig(), ReinforceConfig()], ids=lambda loss: loss.type)
async def test_tokens_that_left_no_choice_have_ratio_1_and_no_gradient(loss):
    only = KeptSets.from_rows([[4], [5]])
    forced = TokenColumns.sampled_tokens([4, 5], [0.0, 0.0], version=0, kept=only).with_credit(1.0)
    _, trainer = trainer_of(open_store("memory://"), loss=loss)
    metrics = (await trainer.train(batch_of(forced))).metrics
    assert (metrics["grad_norm"], metrics["mismatch/max"], metrics["kept/singleton_share"]) == (0.0, 0.0, 1.0)
    assert all(np.isfinite(value) for value in metrics.values())
