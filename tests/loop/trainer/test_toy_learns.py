"""The trainer on the toy model: it learns from traces and from credit, and does it the same way twice."""

import asyncio

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from everlong.contracts.records import EpisodeShare, MicroBatch, ScoreRequest, Segment, TrainBatch
from everlong.contracts.tokens import TokenColumns
from everlong.models.adapter_config import LoraConfig
from everlong.models.checkpoint import load_checkpoint
from everlong.models.numerics import Numerics
from everlong.models.toy import build_toy
from everlong.storage import open_store
from everlong.trainer.config import (
    AdamWConfig,
    CriticConfig,
    GrpoConfig,
    PpoConfig,
    RatioConfig,
    SapoConfig,
    TokenTruncation,
    TrainerConfig,
)
from everlong.trainer.trainer import PolicyTrainer
from everlong.trajectories.credit import GaeConfig, credit_from_values
from everlong.weights import WeightPublisher

PROMPT = TokenColumns.context(np.frombuffer(b"count the lines: ", np.uint8))
GOOD, BAD = (np.frombuffer(text, np.uint8).astype(np.int32) for text in (b"wc -l file", b"rm -rf file"))


def trainer_of(loss, ratio, updates=1, numerics=Numerics.FAST, model=None, rate=1e-3, critic=None):
    store, model = open_store("memory://"), model or build_toy(0, numerics=numerics)
    return PolicyTrainer(
        model,
        config=TrainerConfig(updates_per_batch=updates, head_chunk_tokens=7),
        loss=loss,
        ratio=ratio,
        optimizer=AdamWConfig(learning_rate=rate, warmup_steps=2),
        critic=critic,
        numerics=numerics,
        store=store,
        publisher=WeightPublisher(store, anchor_every=4),
        seed=0,
        lease=asyncio.Lock(),
    )


def batch_of(number, *answers):
    segments, at = [Segment(parent=-1, start=0, length=len(PROMPT), episode=-1)], len(PROMPT)
    for index, answer in enumerate(answers):
        segments.append(Segment(parent=0, start=at, length=len(answer), episode=index))
        at += len(answer)
    micro_batch = MicroBatch(columns=TokenColumns.join([PROMPT, *answers]), segments=tuple(segments))
    shares = tuple(EpisodeShare(episode=f"e{i}", group=0, num_trainable=len(a)) for i, a in enumerate(answers))
    return TrainBatch(batch=number, micro_batches=(micro_batch,), episodes=shares)


async def scores_of(trainer, *answers):
    """Logprobs of each answer below the prompt, under the weights as they are."""
    batch = batch_of(0, *[TokenColumns.supervised(ids) for ids in answers])
    (logprobs,) = (await trainer.score(ScoreRequest(micro_batches=batch.micro_batches))).logprobs
    return np.split(logprobs[len(PROMPT) :], np.cumsum([len(ids) for ids in answers])[:-1])


async def test_traces_are_learned():
    trainer = trainer_of(SapoConfig(), RatioConfig())
    losses = [
        (await trainer.train(batch_of(number, TokenColumns.supervised(GOOD)))).metrics["loss"] for number in range(40)
    ]
    assert losses[0] == pytest.approx(np.log(260), abs=0.2)
    assert losses[-1] < 0.3


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """The checkpoint of a toy that has seen both answers, whole: adapters change what a network can do, and a random one's
    frozen head can say nothing."""

    async def train(folder):
        trainer = trainer_of(SapoConfig(), RatioConfig())
        for number in range(60):
            answers = [TokenColumns.supervised(ids) for ids in (GOOD, BAD)]
            await trainer.train(batch_of(number, *answers))
        await trainer.export(str(folder))

    folder = tmp_path_factory.mktemp("warm") / "checkpoint"
    asyncio.run(train(folder))
    return folder


def adapted(folder):
    model = load_checkpoint(folder, vocab_size=260)
    model.adapt(LoraConfig(rank=4))
    return model


async def test_adapters_alone_learn_which_of_two_traces_to_follow(warm):
    trainer = trainer_of(SapoConfig(), RatioConfig(), model=adapted(warm), rate=3e-3)
    before = [scores.sum() for scores in await scores_of(trainer, GOOD, BAD)]
    for number in range(20):
        await trainer.train(batch_of(number, TokenColumns.supervised(GOOD)))
    after = [scores.sum() for scores in await scores_of(trainer, GOOD, BAD)]
    assert after[0] > before[0] + 0.4 and after[1] < before[1] - 3


async def test_credit_moves_the_policy_through_its_adapters(warm):
    trainer = trainer_of(SapoConfig(), RatioConfig(), model=adapted(warm), rate=3e-4)
    before = [scores.sum() for scores in await scores_of(trainer, GOOD, BAD)]
    for number in range(4):
        answers = [
            TokenColumns.sampled_tokens(ids, logprobs, version=number).with_credit(credit)
            for ids, logprobs, credit in zip((GOOD, BAD), await scores_of(trainer, GOOD, BAD), (1.0, -1.0), strict=True)
        ]
        await trainer.train(batch_of(number, *answers))
    after = [scores.sum() for scores in await scores_of(trainer, GOOD, BAD)]
    assert after[0] > before[0] + 0.3 and after[1] < before[1] - 0.8


@pytest.mark.parametrize("loss", [SapoConfig(), SapoConfig(reduction="sequence"), GrpoConfig()], ids=str)
@pytest.mark.parametrize(
    ("ratio", "updates"),
    [(RatioConfig(), 1), (RatioConfig(base="proximal", correction=TokenTruncation()), 2)],
    ids=["behaviour", "proximal"],
)
async def test_credit_moves_probability_to_what_was_rewarded(loss, ratio, updates):
    trainer = trainer_of(loss, ratio, updates)
    before = [scores.sum() for scores in await scores_of(trainer, GOOD, BAD)]
    for number in range(4):
        answers = [
            TokenColumns.sampled_tokens(ids, logprobs, version=number).with_credit(credit)
            for ids, logprobs, credit in zip((GOOD, BAD), await scores_of(trainer, GOOD, BAD), (1.0, -1.0), strict=True)
        ]
        metrics = (await trainer.train(batch_of(number, *answers))).metrics
        assert metrics["mismatch/max"] < 1e-4
    after = [scores.sum() for scores in await scores_of(trainer, GOOD, BAD)]
    assert after[0] - after[1] > before[0] - before[1] + 5


async def round_of_values(trainer, number, config):
    """Both answers as the policy would have sampled them, the good one rewarded, with credit from the critic's values."""
    answers = [
        TokenColumns.sampled_tokens(ids, np.minimum(logprobs, 0), version=number).with_credit(0.0)
        for ids, logprobs in zip((GOOD, BAD), await scores_of(trainer, GOOD, BAD), strict=True)
    ]
    batch = batch_of(number, *answers)
    shares = tuple(replace(share, reward=reward) for share, reward in zip(batch.episodes, (1.0, 0.0), strict=True))
    batch = replace(batch, episodes=shares)
    scores = await trainer.score(ScoreRequest(micro_batches=batch.micro_batches, wanted=("values",)))
    return (await trainer.train(credit_from_values(batch, scores, config))).metrics


async def test_a_critic_learns_on_a_policy_that_waits_and_then_teaches_it():
    critic = CriticConfig(learning_rate=2e-3, updates_per_batch=4, pretrain_batches=12)
    trainer = trainer_of(PpoConfig(), RatioConfig(), rate=1e-3, critic=critic)
    before = [scores.sum() for scores in await scores_of(trainer, GOOD, BAD)]
    rows = [await round_of_values(trainer, number, GaeConfig()) for number in range(12)]
    waited = [scores.sum() for scores in await scores_of(trainer, GOOD, BAD)]
    assert waited == before
    assert rows[0]["critic/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["critic/explained_variance"] > 0.5, "on values from before the batch was learnt"
    # a group's mean gives every token +-0.5, whatever its answer has shown already
    assert rows[0]["credit/variance"] == pytest.approx(0.25, abs=1e-3) and rows[-1]["credit/variance"] < 0.125
    for number in range(12, 18):
        rows.append(await round_of_values(trainer, number, GaeConfig()))
    after = [scores.sum() for scores in await scores_of(trainer, GOOD, BAD)]
    assert after[0] - after[1] > before[0] - before[1] + 2


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("numerics", list(Numerics))
async def test_a_run_repeats_bit_for_bit(numerics, threads):
    rng = np.random.default_rng(0)
    answers = [
        TokenColumns.sampled_tokens(rng.integers(0, 260, 90), np.full(90, -5.0), version=0).with_credit(float(c))
        for c in rng.normal(size=6)
    ]
    fingerprints = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(2):
            trainer = trainer_of(SapoConfig(), RatioConfig(), numerics=numerics)
            for number in range(3):
                await trainer.train(batch_of(number, *answers))
            fingerprints.append((await trainer.save()).fingerprint)
    finally:
        torch.set_num_threads(before)
    assert fingerprints[0] == fingerprints[1]
