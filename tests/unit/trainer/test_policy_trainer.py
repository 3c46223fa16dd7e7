"""The trainer behind its port, on a tiny llama."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from tests.unit.trainer.tiny import SHAPE, tiny

from everlong.contracts.errors import AlreadyExists, StoreError
from everlong.contracts.records import EpisodeShare, MicroBatch, ScoreRequest, Segment, TrainBatch
from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.models.checkpoint import load_checkpoint
from everlong.models.head import logits_of, processed_log_softmax, truncate
from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.models.numerics import Numerics, tiled_attention
from everlong.storage import open_store
from everlong.trainer.checkpoint import CheckpointStore
from everlong.trainer.config import AdamWConfig, RatioConfig, SapoConfig, TokenTruncation, TrainerConfig
from everlong.trainer.optimizer import MasterOptimizer, gradient_norm, learning_rate
from everlong.trainer.trainer import PolicyTrainer
from everlong.weights import WeightPublisher, WeightReader

PROMPT = TokenColumns.context([3, 9, 2])


def trainer_of(model=None, *, store=None, config=None, ratio=None, optimizer=None, seed=7, lease=None, anchor_every=10):
    model = model or tiny()
    store = store or open_store("memory://")
    return PolicyTrainer(
        model,
        config=config or TrainerConfig(),
        loss=SapoConfig(),
        ratio=ratio or RatioConfig(),
        optimizer=optimizer or AdamWConfig(learning_rate=1e-2, weight_decay=0.1),
        numerics=model.numerics,
        store=store,
        publisher=WeightPublisher(store, anchor_every=anchor_every),
        seed=seed,
        lease=lease or asyncio.Lock(),
    )


def batch_of(number, *answers, prompt=PROMPT):
    """One episode per answer, below one prompt."""
    segments, at = [Segment(parent=-1, start=0, length=len(prompt), episode=-1)], len(prompt)
    for index, answer in enumerate(answers):
        segments.append(Segment(parent=0, start=at, length=len(answer), episode=index))
        at += len(answer)
    micro_batch = MicroBatch(columns=TokenColumns.join([prompt, *answers]), segments=tuple(segments))
    shares = tuple(
        EpisodeShare(episode=f"e{i}", group=0, num_trainable=answer.num_trainable) for i, answer in enumerate(answers)
    )
    return TrainBatch(batch=number, micro_batches=(micro_batch,), episodes=shares)


def sampled(ids, credit, version=0):
    return TokenColumns.sampled_tokens(ids, [-2.0] * len(ids), version=version).with_credit(credit)


def some_batch(number):
    rng = np.random.default_rng(number)
    answers = [sampled(rng.integers(0, 11, 4), credit) for credit in (1.0, -0.5)]
    return batch_of(number, *answers, TokenColumns.supervised(rng.integers(0, 11, 3)))


def weights_of(model):
    return {name: weight.detach().clone() for name, weight in model.named_weights().items()}


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in left)


# Batches -------------------------------------------------------------------------------------------------------------


async def test_a_batch_makes_a_new_version():
    model = tiny()
    before, trainer = weights_of(model), trainer_of(model)
    report = await trainer.train(some_batch(0))
    assert (report.batch, report.policy_version, report.num_updates) == (0, 1, 1)
    assert not same(before, weights_of(model))
    assert report.metrics["tokens/trained"] == 11
    assert report.metrics["tokens/packed"] == 14
    assert report.metrics["grad_norm"] > 0
    assert 0 < report.metrics["entropy"] < np.log(11)


@pytest.mark.parametrize("number", [0, 2])
async def test_a_batch_out_of_order_is_refused_and_changes_nothing(number):
    model = tiny()
    trainer = trainer_of(model)
    await trainer.train(some_batch(0))
    before = weights_of(model)
    with pytest.raises(ValueError, match=f"expected batch 1, got batch {number}"):
        await trainer.train(some_batch(number))
    assert same(before, weights_of(model))
    assert (await trainer.train(some_batch(1))).policy_version == 2


@pytest.mark.parametrize(
    "empty",
    [
        pytest.param(TrainBatch(batch=1, micro_batches=(), episodes=()), id="no micro-batch"),
        pytest.param(batch_of(1, sampled([1, 2], None).freeze()), id="all masked"),
        pytest.param(
            batch_of(
                1,
                sampled([1, 2], 1.0).freeze().replace(logprobs=np.array([-np.inf, np.nan], np.float32)),
            ),
            id="all masked, logprobs broken",
        ),
    ],
)
async def test_a_batch_without_trainable_tokens_changes_no_state(empty):
    model = tiny()
    trainer = trainer_of(model)
    await trainer.train(some_batch(0))
    before = {name: value.clone() for name, value in trainer._optimizer.state().items()}
    report = await trainer.train(empty)
    assert report.metrics["loss"] == 0.0
    assert report.metrics["batches_without_tokens"] == 1
    assert (report.policy_version, report.num_updates) == (2, 0)
    assert same(before, trainer._optimizer.state())


async def test_metrics_speak_of_the_records():
    trainer = trainer_of()
    for number in range(3):
        await trainer.train(some_batch(number))
    kept = KeptSets.from_rows([[4], [1, 5]])
    answer = TokenColumns.sampled_tokens([4, 5], [0.0, -0.7], version=[1, 3], kept=kept).with_credit(1.0)
    metrics = (await trainer.train(batch_of(3, answer))).metrics
    assert (metrics["staleness/max"], metrics["staleness/mean"]) == (2, 1)
    assert metrics["kept/singleton_share"] == 0.5
    assert {"seconds/forward", "seconds/backward", "seconds/optimizer"} <= metrics.keys()


async def test_what_was_not_measured_is_absent():
    metrics = (await trainer_of().train(batch_of(0, TokenColumns.supervised([1, 2])))).metrics
    assert metrics["loss"] == pytest.approx(metrics["loss/supervised"])
    assert not [name for name in metrics if name.startswith(("ratio", "mismatch", "staleness", "entropy"))]


async def test_several_updates_move_away_from_the_proximal_policy():
    ratio = RatioConfig(base="proximal", correction=TokenTruncation())
    trainer = trainer_of(config=TrainerConfig(updates_per_batch=3), ratio=ratio)
    report = await trainer.train(batch_of(0, sampled([1, 2, 3], 1.0)))
    assert report.num_updates == 3
    assert report.metrics["ratio/max"] > 1.01
    assert report.metrics["mismatch/max"] > 0.1


async def test_a_loss_without_effect_is_refused():
    with pytest.raises(ValueError, match="no effect"):
        trainer_of(ratio=RatioConfig(base="proximal"))


# Replay --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample_as_an_engine_would(model, answers, temperature, top_p):
    """Score fixed answers token by token below the prompt, with a kept set decided here."""
    columns = []
    for ids in answers:
        whole = torch.tensor([*PROMPT.ids.tolist(), *ids])
        logprobs, rows = [], []
        for end in range(len(PROMPT), len(whole)):
            positions = torch.arange(end)

            def attend(layer, q, k, v, positions=positions):
                return tiled_attention(q[None], k[None], v[None], positions[None], SHAPE.head_dim**-0.5)[0]

            hidden = model(whole[:end], positions, attend)[-1:]
            logits = logits_of(hidden, model.head_weight, SHAPE, model.numerics)
            heat = torch.tensor([temperature])
            keep = truncate(logits, heat, torch.tensor([0]), torch.tensor([top_p]))
            keep[0, whole[end]] = True
            logprobs.append(float(processed_log_softmax(logits, heat, keep)[0, whole[end]]))
            rows.append(keep[0].nonzero()[:, 0].tolist())
        kept = KeptSets.from_rows(rows)
        columns.append(TokenColumns.sampled_tokens(ids, logprobs, version=0, temperature=temperature, kept=kept))
    return columns


async def test_ratios_are_exactly_one_when_the_weights_are_the_samplers():
    model = tiny(numerics=Numerics.ALIGNED)
    warm = sample_as_an_engine_would(model, [[4, 1, 7, 7], [10, 0]], temperature=0.7, top_p=0.9)
    hot = sample_as_an_engine_would(model, [[5, 5, 6]], temperature=1.5, top_p=0.8)
    answers = [columns.with_credit(1.0) for columns in (*warm, *hot)]
    metrics = (await trainer_of(model).train(batch_of(0, *answers))).metrics
    assert metrics["ratio/max"] == metrics["ratio/mean"] == 1.0
    assert metrics["mismatch/max"] == metrics["mismatch/kl"] == 0.0
    assert metrics["mismatch/effective_share"] == 1.0


async def test_mismatch_is_told_by_engine_and_by_the_version_under_which_a_turn_began():
    """An update came into the first turn: its last tokens were sampled over what the older weights had left in the cache."""
    trainer = trainer_of()
    await trainer.train(some_batch(0))
    answers = [
        sampled([1, 2, 3, 4], 1.0, version=[0, 0, 1, 1]).replace(engines=np.zeros(4, np.int16)),
        sampled([5, 6], 1.0, version=1).replace(engines=np.ones(2, np.int16)),
        sampled([7], 1.0, version=0).replace(engines=np.ones(1, np.int16)),
        sampled([8], 1.0, version=1),
    ]
    report = await trainer.train(batch_of(1, *answers))
    assert [(part.engine, part.age, part.num_tokens) for part in report.mismatch] == [(0, 1, 4), (1, 0, 2), (1, 1, 1)]
    assert report.metrics["staleness/mean"] == pytest.approx(3 / 8)


@pytest.mark.parametrize("lost", ["kept", "temperatures"])
async def test_a_lost_kept_set_or_temperature_shows_in_the_mismatch(lost):
    model = tiny(numerics=Numerics.ALIGNED)
    (answer,) = sample_as_an_engine_would(model, [[4, 1, 7, 7]], temperature=0.7, top_p=0.9)
    wrong = KeptSets.empty(4) if lost == "kept" else np.ones(4, np.float32)
    answer = answer.replace(**{lost: wrong}).with_credit(1.0)
    metrics = (await trainer_of(model).train(batch_of(0, answer))).metrics
    assert metrics["mismatch/max"] > 1e-2


async def test_scores_are_absent_where_nothing_was_sampled_or_taught():
    trainer = trainer_of()
    batch = batch_of(0, sampled([1, 2], 1.0), TokenColumns.supervised([5]), sampled([6], None).freeze())
    scored = await trainer.score(ScoreRequest(micro_batches=batch.micro_batches))
    assert scored.policy_version == 0
    (logprobs,) = scored.logprobs
    assert np.isnan(logprobs).tolist() == [True, True, True, False, False, False, False]
    assert np.all(logprobs[3:] < 0)
    metrics = (await trainer.train(batch)).metrics
    assert metrics["mismatch/max"] == pytest.approx(np.abs(logprobs[3:5] + 2).max(), abs=1e-6)


# The optimiser -------------------------------------------------------------------------------------------------------


def test_the_norm_runs_over_all_tensors():
    assert gradient_norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]) == 5.0


def test_the_learning_rate_grows_with_the_steps():
    config = AdamWConfig(learning_rate=0.4, warmup_steps=4)
    assert [learning_rate(config, n) for n in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert learning_rate(AdamWConfig(learning_rate=0.4), 0) == 0.4


async def test_the_schedule_counts_steps_made_and_goes_on_where_it_stood():
    """Two steps a batch; a batch without a trained token makes none."""
    ratio, store = RatioConfig(base="proximal", correction=TokenTruncation()), open_store("memory://")
    optimizer = AdamWConfig(learning_rate=0.6, warmup_steps=6)
    settings = {"config": TrainerConfig(updates_per_batch=2), "ratio": ratio, "optimizer": optimizer, "store": store}
    trainer = trainer_of(**settings)
    rates = [(await trainer.train(some_batch(0))).metrics["learning_rate"]]
    await trainer.train(TrainBatch(batch=1, micro_batches=(), episodes=()))
    await trainer.save()
    resumed = trainer_of(**settings)
    await resumed.restore()
    rates += [(await resumed.train(some_batch(number))).metrics["learning_rate"] for number in (2, 3, 4)]
    assert rates == pytest.approx([0.2, 0.4, 0.6, 0.6])


def test_supervised_batches_may_have_a_learning_rate_of_their_own():
    config = AdamWConfig(learning_rate=0.1, supervised_learning_rate=0.4)
    assert learning_rate(config, 5) == 0.1
    assert learning_rate(config, 5, supervised=True) == 0.4
    assert learning_rate(AdamWConfig(learning_rate=0.1), 5, supervised=True) == 0.1


def test_a_step_is_adamw_of_the_clipped_gradient():
    model = tiny()
    reference = [torch.nn.Parameter(weight.detach().clone()) for weight in model.named_weights().values()]
    adamw = torch.optim.AdamW(reference, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    optimizer = MasterOptimizer(model, AdamWConfig(learning_rate=1e-2, max_grad_norm=0.5))
    generator = torch.Generator().manual_seed(1)
    for batch in range(3):
        gradient = [torch.randn(weight.shape, generator=generator) for weight in reference]
        for parameter, part in zip(reference, gradient, strict=True):
            parameter.grad = part.clone()
        norm = torch.nn.utils.clip_grad_norm_(reference, 0.5)
        adamw.step()
        assert optimizer.step(gradient, batch, 1e-2) == pytest.approx(float(norm), rel=1e-5)
    for mine, other in zip(model.parameters(), reference, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_norms_are_never_decayed():
    model = tiny()
    before = weights_of(model)
    optimizer = MasterOptimizer(model, AdamWConfig(learning_rate=0.1, weight_decay=0.5))
    optimizer.step([torch.zeros_like(weight) for weight in model.parameters()], 0, 0.1)
    for name, weight in model.named_weights().items():
        torch.testing.assert_close(weight, before[name] * (1.0 if "norm" in name else 0.95))


def test_a_gradient_that_is_not_finite_changes_nothing():
    model = tiny()
    optimizer = MasterOptimizer(model, AdamWConfig())
    before = {name: value.clone() for name, value in optimizer.state().items()}
    for bad in (float("nan"), float("inf")):
        gradient = [torch.full_like(weight, bad) for weight in model.parameters()]
        with pytest.raises(FloatingPointError, match="batch 3 has norm"):
            optimizer.step(gradient, 3, 0.1)
    assert same(before, optimizer.state())


async def test_masters_gather_steps_too_small_for_bfloat16():
    model = tiny(torch.bfloat16)
    trainer = trainer_of(model, optimizer=AdamWConfig(learning_rate=1e-5))
    before = weights_of(model)
    for number in range(3):
        await trainer.train(some_batch(number))
    state = trainer._optimizer.state()
    for name, weight in model.named_weights().items():
        master = state[f"master/{name}"]
        assert master.dtype == torch.float32
        assert torch.equal(weight, master.bfloat16())
    moved = torch.cat([(state[f"master/{n}"] != w.float()).flatten() for n, w in before.items()]).float().mean()
    changed = torch.cat([(weights_of(model)[n] != w).flatten() for n, w in before.items()]).float().mean()
    assert moved > 0.9
    assert changed < 0.1


# Checkpoints ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
async def test_training_goes_on_bit_for_bit_after_a_restore(dtype):
    undisturbed = trainer_of(tiny(dtype))
    for number in range(4):
        await undisturbed.train(some_batch(number))
    store = open_store("memory://")
    first = trainer_of(tiny(dtype), store=store)
    for number in range(2):
        await first.train(some_batch(number))
    saved = await first.save()
    second = trainer_of(tiny(dtype), store=store)
    assert await second.restore() == saved
    for number in range(2, 4):
        await second.train(some_batch(number))
    assert same(undisturbed._optimizer.state(), second._optimizer.state())
    assert await second.save() == await undisturbed.save()


async def test_restore_takes_the_newest_checkpoint_up_to_a_batch():
    trainer = trainer_of(config=TrainerConfig(checkpoint_keep=3))
    statuses = [await trainer.save()]
    for number in range(2):
        await trainer.train(some_batch(number))
        statuses.append(await trainer.save())
    assert await trainer.restore(1) == statuses[1]
    assert (await trainer.train(some_batch(1))).policy_version == 2
    assert await trainer.save() == statuses[2]
    assert (await trainer.restore()).num_batches == 2


async def test_without_a_checkpoint_training_starts_anew():
    model = tiny()
    before, trainer = weights_of(model), trainer_of(model)
    await trainer.train(some_batch(0))
    status = await trainer.restore()
    assert (status.num_batches, status.policy_version) == (0, 0)
    assert same(before, weights_of(model))
    assert same(trainer_of()._optimizer.state(), trainer._optimizer.state())


async def test_only_the_newest_checkpoints_stay():
    store = open_store("memory://")
    trainer = trainer_of(store=store, config=TrainerConfig(checkpoint_keep=2))
    store.put("checkpoints/000001/torn.safetensors", b"half")
    for number in range(4):
        await trainer.train(some_batch(number))
        await trainer.save()
    assert CheckpointStore(store, 2).numbers() == [3, 4]
    assert {key.split("/")[1] for key in store.list("checkpoints")} == {"000003", "000004"}


async def test_a_checkpoint_whose_writer_died_before_the_manifest_is_not_there():
    store = open_store("memory://")
    trainer = trainer_of(store=store)
    await trainer.train(some_batch(0))
    whole = await trainer.save()
    store.put("checkpoints/000002/torn.safetensors", b"half")
    assert await trainer.restore() == whole
    await trainer.train(some_batch(1))
    assert (await trainer.save()).num_batches == 2


@pytest.mark.parametrize("part", ["tensors", "manifest", "lost"])
async def test_a_damaged_checkpoint_is_refused_and_an_older_one_named(part):
    store = open_store("memory://")
    trainer = trainer_of(store=store)
    for number in range(2):
        await trainer.train(some_batch(number))
        await trainer.save()
    tensors, manifest = sorted(store.list("checkpoints/000002"), key=lambda key: key.endswith("json"))
    if part == "tensors":
        data = bytearray(store.get(tensors))
        data[-1] ^= 1
        store.put(tensors, bytes(data))
    elif part == "manifest":
        store.put(manifest, b"{")
    else:
        store.delete(tensors)
    with pytest.raises(StoreError, match=r"checkpoint 2 is damaged .* restore an older one, with num_batches=1"):
        await trainer.restore()
    assert (await trainer.restore(1)).num_batches == 1


async def test_saving_twice_leaves_the_first_as_it_is():
    store = open_store("memory://")
    trainer = trainer_of(store=store)
    await trainer.train(some_batch(0))
    first = await trainer.save()
    keys = {key: store.get(key) for key in store.list("checkpoints")}
    assert await trainer.save() == first
    assert {key: store.get(key) for key in store.list("checkpoints")} == keys


async def test_a_checkpoint_of_the_same_batch_with_other_weights_is_refused():
    store = open_store("memory://")
    one, other = trainer_of(store=store), trainer_of(store=store, optimizer=AdamWConfig(learning_rate=1e-3))
    for trainer in (one, other):
        await trainer.train(some_batch(0))
    await one.save()
    with pytest.raises(AlreadyExists, match="checkpoint 1 holds weights"):
        await other.save()


async def test_a_checkpoint_of_another_run_or_model_is_refused():
    store = open_store("memory://")
    trainer = trainer_of(store=store)
    await trainer.train(some_batch(0))
    await trainer.save()
    with pytest.raises(ValueError, match="run with seed 7, this run has 8"):
        await trainer_of(store=store, seed=8).restore()
    wider = Llama(LlamaConfig(**{**{f: getattr(SHAPE, f) for f in SHAPE.__slots__}, "intermediate_size": 32}))
    with pytest.raises(ValueError, match="another model"):
        await trainer_of(wider, store=store).restore()


# Versions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
async def test_engines_read_the_bits_that_were_trained(dtype):
    model, store = tiny(dtype), open_store("memory://")
    trainer = trainer_of(model, store=store)
    published = [await trainer.publish()]
    for number in range(2):
        await trainer.train(some_batch(number))
        published.append(await trainer.publish())
    assert [(p.version, p.base_version) for p in published] == [(0, None), (1, 0), (2, 1)]
    assert published[2].fingerprint == (await trainer.save()).fingerprint
    read = WeightReader(store).read(2)
    for name, weight in model.named_weights().items():
        bits = weight.detach().view(torch.int16 if dtype == torch.bfloat16 else torch.int32).numpy()
        assert np.array_equal(read.tensors[name].bits.view(bits.dtype), bits)


async def test_publishing_the_same_version_again_gives_the_one_that_exists():
    store = open_store("memory://")
    trainer = trainer_of(store=store)
    await trainer.publish()
    await trainer.train(some_batch(0))
    first = await trainer.publish()
    assert await trainer.publish() == first
    await trainer.save()
    resumed = trainer_of(store=store)
    await resumed.restore()
    assert await resumed.publish() == first
    await resumed.train(some_batch(1))
    assert (await resumed.publish()).base_version == 1


async def test_a_master_that_rounds_to_the_published_weight_keeps_what_the_rounding_took():
    store = open_store("memory://")
    first = trainer_of(tiny(torch.bfloat16), store=store)
    await first.train(some_batch(0))
    await first.publish()
    again = trainer_of(
        tiny(torch.bfloat16), store=store, optimizer=AdamWConfig(learning_rate=1.01e-2, weight_decay=0.1)
    )
    await again.train(some_batch(0))
    before = {name: value.clone() for name, value in again._optimizer.state().items()}
    assert (await again.reconcile()).adopted
    after, changed, kept = again._optimizer.state(), 0, 0
    for name, weight in again._model.trained_weights().items():
        old, new = before[f"master/{name}"], after[f"master/{name}"]
        stays = old.bfloat16() == weight
        assert torch.equal(new[stays], old[stays]) and torch.equal(new[~stays], weight[~stays].float())
        kept, changed = kept + int((stays & (old != weight.float())).sum()), changed + int((~stays).sum())
    assert kept > 0 and changed > 0
    assert all(torch.equal(after[name], value) for name, value in before.items() if not name.startswith("master/"))


async def test_aligned_numerics_take_no_other_bits_for_what_was_published():
    store = open_store("memory://")
    first = trainer_of(tiny(numerics=Numerics.ALIGNED), store=store)
    await first.train(some_batch(0))
    await first.publish()
    model = tiny(numerics=Numerics.ALIGNED)
    again = trainer_of(model, store=store, optimizer=AdamWConfig(learning_rate=2e-2))
    await again.train(some_batch(0))
    before = weights_of(model)
    with pytest.raises(
        ValueError, match="policy version 1 has the fingerprint .* same kind of CPU with the same number"
    ):
        await again.reconcile()
    assert same(before, weights_of(model))


async def test_an_exported_policy_loads_with_the_same_bits(tmp_path):
    model = tiny()
    trainer = trainer_of(model)
    await trainer.train(some_batch(0))
    await trainer.export(str(tmp_path / "policy"))
    assert same(weights_of(model), weights_of(load_checkpoint(tmp_path / "policy")))


# The lease -----------------------------------------------------------------------------------------------------------


async def test_work_waits_for_the_lease():
    lease = asyncio.Lock()
    trainer = trainer_of(lease=lease)
    async with lease:
        training = asyncio.create_task(trainer.train(some_batch(0)))
        await asyncio.sleep(0.02)
        assert trainer._num_batches == 0
    assert (await training).policy_version == 1
    await trainer.close()
    await trainer.close()


async def test_a_cancelled_call_keeps_the_lease_until_its_thread_is_done():
    lease, started, go = asyncio.Lock(), threading.Event(), threading.Event()
    trainer = trainer_of(lease=lease)

    def work():
        started.set()
        go.wait(5)

    call = asyncio.create_task(trainer._run(work))
    await asyncio.to_thread(started.wait, 5)
    call.cancel()
    await asyncio.sleep(0.01)
    assert lease.locked()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not lease.locked()
