"""What every `Trainer` promises, on the one that trains and on the fake that ships."""

import asyncio

import numpy as np
import pytest

from everlong.contracts.ports import Trainer
from everlong.contracts.records import EpisodeShare, MicroBatch, ScoreRequest, Segment, TrainBatch
from everlong.contracts.tokens import TokenColumns
from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.models.numerics import Numerics
from everlong.storage import open_store
from everlong.trainer.config import AdamWConfig, RatioConfig, SapoConfig, TrainerConfig
from everlong.trainer.scripted import ScriptedTrainer
from everlong.trainer.trainer import PolicyTrainer
from everlong.weights import WeightPublisher, WeightReader, fingerprint

SHAPE = LlamaConfig(
    vocab_size=11, padded_vocab_size=16, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2,
    num_kv_heads=1, head_dim=8, max_positions=64,
)  # fmt: skip


def policy_trainer(store) -> Trainer:
    model = Llama(SHAPE)
    for i, weight in enumerate(model.named_weights().values()):
        weight.data.copy_(0.1 * (weight.data + 1 + i).cumsum(0).sin())
    return PolicyTrainer(
        model,
        config=TrainerConfig(checkpoint_keep=5),
        loss=SapoConfig(),
        ratio=RatioConfig(),
        optimizer=AdamWConfig(learning_rate=1e-2),
        numerics=Numerics.FAST,
        store=store,
        publisher=WeightPublisher(store, anchor_every=10),
        seed=0,
        lease=asyncio.Lock(),
    )


def scripted_trainer(store) -> Trainer:
    return ScriptedTrainer(store, WeightPublisher(store, anchor_every=10))


@pytest.fixture(params=[policy_trainer, scripted_trainer], ids=["policy", "scripted"])
def make(request):
    return request.param


@pytest.fixture
def store():
    return open_store("memory://")


def batch_of(number, count=4):
    rng = np.random.default_rng(number)
    prompt = TokenColumns.context([1, 2])
    answer = TokenColumns.sampled_tokens(rng.integers(0, 11, count), -rng.random(count) - 1, version=0)
    micro_batch = MicroBatch(
        columns=prompt + answer.with_credit(1.0),
        segments=(
            Segment(parent=-1, start=0, length=2, episode=-1),
            Segment(parent=0, start=2, length=count, episode=0),
        ),
    )
    share = EpisodeShare(episode="e", group=0, num_trainable=count)
    return TrainBatch(batch=number, micro_batches=(micro_batch,), episodes=(share,))


async def trained(trainer, *numbers):
    for number in numbers:
        await trainer.train(batch_of(number))
    return trainer


async def test_every_batch_is_a_version(make, store):
    trainer = make(store)
    for number in range(3):
        report = await trainer.train(batch_of(number))
        assert (report.batch, report.policy_version) == (number, number + 1)
        assert report.metrics["tokens/trained"] == 4


@pytest.mark.parametrize("number", [0, 2])
async def test_only_the_next_batch_is_taken(make, store, number):
    trainer = await trained(make(store), 0)
    with pytest.raises(ValueError, match=f"expected batch 1, got batch {number}"):
        await trainer.train(batch_of(number))
    assert (await trainer.train(batch_of(1))).policy_version == 2


async def test_a_batch_without_tokens_leaves_the_weights(make, store):
    trainer = await trained(make(store), 0)
    before = (await trainer.save()).fingerprint
    report = await trainer.train(TrainBatch(batch=1, micro_batches=(), episodes=()))
    assert (report.policy_version, report.num_updates) == (2, 0)
    assert (await trainer.save()).fingerprint == before


async def test_a_restored_trainer_goes_on_as_if_nothing_had_been(make, store):
    expected = await (await trained(make(open_store("memory://")), 0, 1, 2)).save()
    first = await trained(make(store), 0, 1)
    saved = await first.save()
    second = make(store)
    assert await second.restore() == saved
    assert await (await trained(second, 2)).save() == expected


async def test_an_older_checkpoint_can_be_taken_up(make, store):
    trainer = make(store)
    statuses = [await (await trained(trainer, number)).save() for number in range(3)]
    assert await trainer.restore(2) == statuses[1]
    assert await trainer.save() == statuses[1]
    assert await (await trained(trainer, 2)).save() == statuses[2]


async def test_without_a_checkpoint_it_starts_anew(make, store):
    fresh = await make(open_store("memory://")).save()
    trainer = await trained(make(store), 0)
    assert await trainer.restore() == fresh
    assert fresh.num_batches == fresh.policy_version == 0


async def test_a_published_version_holds_the_weights_of_the_status(make, store):
    trainer = make(store)
    first = await trainer.publish()
    second = await (await trained(trainer, 0)).publish()
    assert (first.version, first.base_version, second.version, second.base_version) == (0, None, 1, 0)
    status = await trainer.save()
    assert second.fingerprint == status.fingerprint == fingerprint(WeightReader(store).read(1))


async def test_publishing_a_version_again_is_no_error(make, store):
    trainer = make(store)
    await trainer.publish()
    first = await (await trained(trainer, 0)).publish()
    await trainer.save()
    assert await trainer.publish() == first
    again = make(store)
    await again.restore()
    assert await again.publish() == first


async def test_weights_that_are_what_was_published_or_have_no_version_stay(make, store):
    trainer = await trained(make(store), 0)
    saved = await trainer.save()
    found = await trainer.reconcile()
    assert (found.policy_version, found.trained, found.published, found.adopted) == (1, saved.fingerprint, None, False)
    await trainer.publish()
    found = await trainer.reconcile()
    assert (found.trained, found.published, found.adopted) == (saved.fingerprint, saved.fingerprint, False)


async def test_weights_that_came_out_otherwise_give_way_to_those_that_were_published(make, store):
    published = await (await trained(make(store), 0)).publish()
    again = make(store)
    await again.train(batch_of(0, count=3))  # as if another machine had rounded otherwise
    found = await again.reconcile()
    assert found.adopted and found.published == published.fingerprint != found.trained
    assert (await again.save()).fingerprint == published.fingerprint
    assert (await again.publish()) == published
    await again.train(batch_of(1))
    after = await again.publish()
    assert (after.version, after.base_version) == (2, 1)
    assert fingerprint(WeightReader(store).read(2)) == after.fingerprint


async def test_scores_are_absent_where_nothing_was_sampled(make, store):
    scored = await make(store).score(ScoreRequest(micro_batches=batch_of(0).micro_batches))
    assert scored.policy_version == 0
    assert np.isnan(scored.logprobs[0]).tolist() == [True, True, False, False, False, False]


async def test_closing_twice_is_no_error(make, store):
    trainer = await trained(make(store), 0)
    await trainer.close()
    await trainer.close()
