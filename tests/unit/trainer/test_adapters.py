"""Training through adapters: what moves, what is published and kept, and that engine, checkpoint and reference follow."""

import asyncio

import numpy as np
import pytest
import torch
from safetensors.torch import load
from tests.unit.trainer.test_reference import answer, batch_of, same, weights_of
from tests.unit.trainer.tiny import SHAPE, tiny

from everlong.contracts.errors import EngineError
from everlong.contracts.tokens import TokenColumns
from everlong.engines.config import EmbeddedConfig
from everlong.engines.torch_engine.engine import TorchEngine
from everlong.models.adapter_config import LoraConfig
from everlong.models.llama.model import Llama
from everlong.models.numerics import Numerics, linear
from everlong.storage import open_store
from everlong.trainer.config import AdamWConfig, KlLoss, RatioConfig, SapoConfig, TrainerConfig
from everlong.trainer.kl_config import WITHOUT_KL
from everlong.trainer.objective import Objective
from everlong.trainer.preparation import prepare_batch
from everlong.trainer.reference import KEY, ReferencePolicy
from everlong.trainer.scoring import score_micro_batch
from everlong.trainer.step import batch_gradient
from everlong.trainer.tally import Tally
from everlong.trainer.trainer import PolicyTrainer
from everlong.weights import WeightPublisher, WeightReader, fingerprint
from everlong.weights.manifest import load_manifest

LORA = LoraConfig(rank=2, alpha=6.0)


def adapted(dtype=torch.float32, numerics=Numerics.FAST, config=LORA):
    model = tiny(dtype, numerics)
    model.adapt(config)
    return model


def trainer_of(model, store, kl=WITHOUT_KL):
    return PolicyTrainer(
        model, config=TrainerConfig(), loss=SapoConfig(), ratio=RatioConfig(), kl=kl,
        optimizer=AdamWConfig(learning_rate=1e-2, weight_decay=0.1), numerics=model.numerics, store=store,
        publisher=WeightPublisher(store, anchor_every=3), seed=7, lease=asyncio.Lock(),
    )  # fmt: skip


def sampled(number):
    return batch_of(number, answer(number, 1.0, versions=number), answer(number + 50, -1.0, versions=number))


def trained(model):
    return {name: weight.detach().clone() for name, weight in model.trained_weights().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_frozen_weights_keep_every_bit_while_adapters_move(dtype):
    model = adapted(dtype)
    frozen, before = weights_of(model), trained(model)
    trainer = trainer_of(model, open_store("memory://"), KlLoss())
    for number in range(3):
        assert (await trainer.train(sampled(number))).metrics["grad_norm"] > 0
    assert same(weights_of(model), frozen)
    after = trained(model)
    assert all(not torch.equal(after[name], before[name]) for name in before), "every A and every B moved"


def test_the_gradient_is_that_of_the_merged_weights_by_the_chain_rule():
    """dA = s B' dW and dB = s dW A', dW being the whole model's gradient at W + s B A."""
    model, whole = adapted(), tiny()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.trained_weights().values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    whole.load_weights(model.merged_weights())
    batch = prepare_batch(sampled(0), Objective(SapoConfig(), RatioConfig()), SHAPE)
    gradients = {}
    for network in (model, whole):
        step = batch_gradient(network, batch, Objective(SapoConfig(), RatioConfig()), None, 512, Tally())
        gradients |= dict(zip(network.trained_weights(), step.gradient, strict=True))
    for name, own in model.trained_weights().items():
        if not name.endswith("lora_A.weight"):
            continue
        place = name.removesuffix(".lora_A.weight")
        up, change = model.trained_weights()[f"{place}.lora_B.weight"].detach(), gradients[f"{place}.weight"]
        torch.testing.assert_close(gradients[name], 3.0 * up.T @ change, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(
            gradients[f"{place}.lora_B.weight"], 3.0 * change @ own.detach().T, rtol=1e-3, atol=1e-6
        )


def engine_of(model, store):
    return TorchEngine(
        model, WeightReader(store), token_bytes=[bytes([n]) for n in range(SHAPE.vocab_size)],
        config=EmbeddedConfig(cache_tokens=64, block_tokens=16, max_context=64), lease=asyncio.Lock(),
    )  # fmt: skip


async def test_an_engine_without_adapters_refuses_a_version_of_adapters():
    store = open_store("memory://")
    await trainer_of(adapted(), store).publish()
    engine = engine_of(tiny(), store)
    with pytest.raises(EngineError, match=r"version 0 does not fit the engine's model.*lora_A.* on one side only"):
        await engine.update(0)
    await engine.close()


@pytest.mark.parametrize("numerics", list(Numerics))
async def test_an_engine_uses_what_the_trainer_has_and_says_so(numerics):
    """A synced step reaches the sampler: what it computes with has changed, and is what the trainer computes with."""
    store, model = open_store("memory://"), adapted(numerics=numerics)
    trainer = trainer_of(model, store)
    engine = engine_of(adapted(numerics=numerics, config=LORA.model_copy(update={"seed": 9})), store)
    seen, sizes = [], []
    for number in range(5):
        sizes.append((await trainer.publish()).size_bytes)
        status = await engine.update(number)
        assert status.fingerprint == (await trainer.save()).fingerprint
        seen.append(status.fingerprint)
        await trainer.train(sampled(number))
    assert len(set(seen)) == 5, "each version is another one in the engine too"
    held = {entry.name for number in range(5) for entry in load_manifest(store, number).tensors}
    assert held == set(model.trained_weights()), "versions hold adapters alone"
    num_adapter_bytes = sum(4 * weight.numel() for weight in model.trained_weights().values())
    assert max(sizes) < 1.2 * num_adapter_bytes
    await engine.close()


async def test_a_resumed_run_equals_the_undisturbed_one():
    store = open_store("memory://")
    first = trainer_of(adapted(torch.bfloat16), store)
    for number in range(2):
        await first.train(sampled(number))
    await first.save()
    (key,) = (key for key in store.list("checkpoints") if key.endswith(".safetensors"))
    adapters = sum(weight.numel() for weight in adapted().trained_weights().values())
    assert len(store.get(key)) < 3.5 * 4 * adapters + 30_000, (
        "adapters and their moments, nothing of the frozen weights"
    )
    again = trainer_of(adapted(torch.bfloat16, config=LORA.model_copy(update={"seed": 3})), store)
    assert (await again.restore()).num_batches == 2
    for trainer in (first, again):
        await trainer.train(sampled(2))
    assert (await first.save()).fingerprint == (await again.save()).fingerprint


async def test_published_adapters_above_other_frozen_weights_are_not_taken_up():
    store = open_store("memory://")
    await trainer_of(adapted(), store).publish()
    other = tiny()
    with torch.no_grad():
        next(iter(other.named_weights().values())).mul_(2.0)
    other.adapt(LORA, None)
    with pytest.raises(ValueError, match="policy version 0 .* on other frozen weights: restore the model"):
        await trainer_of(other, store).reconcile()


async def test_a_checkpoint_above_other_frozen_weights_is_refused():
    store = open_store("memory://")
    await trainer_of(adapted(), store).save()
    other = tiny()
    with torch.no_grad():
        other.head_weight[0, 0] += 1e-3
    other.adapt(LORA)
    with pytest.raises(ValueError, match="the model that the run was started with has changed"):
        await trainer_of(other, store).restore()


async def test_a_run_without_checkpoint_starts_anew():
    model = adapted()
    before, trainer = trained(model), trainer_of(model, open_store("memory://"))
    await trainer.train(sampled(0))
    await trainer.restore()
    assert same(trained(model), before)


async def test_the_reference_is_the_policy_with_its_adapters_off():
    """And no second copy of the network: the store keeps the adapters of it alone."""
    store, model = open_store("memory://"), adapted()
    trainer = trainer_of(model, store, KlLoss(coefficient=0.5))
    for number in range(2):
        metrics = (await trainer.train(sampled(number))).metrics
    assert metrics["kl"] > 0
    (micro_batch,) = sampled(0).micro_batches
    own, off = score_micro_batch(model, micro_batch, 512), score_micro_batch(tiny(), micro_batch, 512)
    asked = ReferencePolicy(model, store).ask(lambda: score_micro_batch(model, micro_batch, 512))
    assert np.array_equal(asked, off, equal_nan=True) and not np.array_equal(asked, own, equal_nan=True)
    assert load(store.get(KEY)).keys() == model.trained_weights().keys()


async def test_what_warm_up_taught_the_adapters_is_part_of_the_reference():
    store, model = open_store("memory://"), adapted()
    trainer = trainer_of(model, store, KlLoss(coefficient=0.5))
    await trainer.train(batch_of(0, TokenColumns.supervised([5, 6])))
    assert (await trainer.train(sampled(1))).metrics["kl"] == 0.0


class Deaf(Llama):
    """Multiplies by its own weights alone."""

    def project(self, layer, projection, x, weight):
        return linear(x, weight, self.numerics)


async def test_a_network_that_leaves_its_adapters_out_is_refused():
    model = Deaf(SHAPE)
    model.load_weights(tiny().named_weights())
    model.adapt(LORA)
    with pytest.raises(ValueError, match=r"q_proj.lora_A.weight and 27 more have no part in the network's forward"):
        await trainer_of(model, open_store("memory://")).train(sampled(0))


async def test_what_the_trainer_publishes_is_read_as_it_is_held():
    store, model = open_store("memory://"), adapted()
    trainer = trainer_of(model, store)
    await trainer.train(sampled(0))
    published = await trainer.publish()
    read = WeightReader(store).read(1)
    assert fingerprint(read) == published.fingerprint
    for name, weight in {**model.named_weights(), **model.trained_weights()}.items():
        bits = {**read.frozen, **read.tensors}[name].bits
        assert np.array_equal(bits.view(np.float32), weight.detach().numpy())
