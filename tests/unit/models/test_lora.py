"""Adapters beside frozen weights: the formula, its gradient, and what others read of them."""

import json

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file

from everlong.models.adapter_config import LoraConfig
from everlong.models.attention import TreeAttention
from everlong.models.checkpoint import load_checkpoint, save_checkpoint
from everlong.models.llama.lora import Adapter, low_rank
from everlong.models.llama.model import Llama
from everlong.models.llama.packed import PackedLlama
from everlong.models.numerics import Numerics, NumericsUnavailable, linear, self_test
from everlong.models.toy import build_toy

NUM_TOKENS = 40
SOME = LoraConfig(rank=4, alpha=12.0, targets=("down_proj", "q_proj", "v_proj", "up_proj"))


def adapted(config=SOME, dtype=torch.float32, numerics=Numerics.FAST, seed=0) -> Llama:
    """The toy with adapters that have learned something."""
    model = build_toy(seed, dtype, numerics)
    model.adapt(config)
    teach(model, 5)
    return model


@torch.no_grad()
def teach(model: Llama, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.trained_weights().items():
        if name.endswith("lora_B.weight"):
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)


def logits_of(model, network) -> torch.Tensor:
    ids = torch.randint(0, 256, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    attend = TreeAttention([(-1, 0, NUM_TOKENS)], model.config.head_dim**-0.5, model.numerics)
    with torch.inference_mode():
        return network.logits(network(ids, torch.arange(NUM_TOKENS), attend))


def test_outputs_and_gradients_are_those_of_the_formula():
    """y = x W' + s x A' B';  dx = dy W + s dy B A,  dA = s B' dy' x,  dB = s dy' x A'  (' transposed), in float64."""
    generator = torch.Generator().manual_seed(0)
    x, w, a, b, dy = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((5, 7), (6, 7), (3, 7), (6, 3), (5, 6))
    )
    s = 0.75
    inputs = [t.clone().requires_grad_() for t in (x, a, b)]
    y = linear(inputs[0], w, Numerics.FAST) + low_rank(inputs[0], Adapter(inputs[1], inputs[2]), s, Numerics.FAST)
    torch.testing.assert_close(y, x @ w.T + s * (x @ a.T @ b.T), rtol=1e-14, atol=1e-14)
    found = torch.autograd.grad(y, inputs, dy)
    expected = (dy @ w + s * dy @ b @ a, s * b.T @ dy.T @ x, s * dy.T @ x @ a.T)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


def test_the_first_policy_is_the_frozen_one_to_the_bit():
    plain, model = build_toy(0), build_toy(0)
    model.adapt(LoraConfig())
    assert torch.equal(logits_of(model, model), logits_of(plain, plain))


def test_adapters_stand_where_their_targets_are_and_repeat_by_seed():
    model, again, other = (build_toy(0) for _ in range(3))
    model.adapt(SOME)
    again.adapt(SOME)
    other.adapt(SOME.model_copy(update={"seed": 1}))
    own = model.trained_weights()
    assert len(own) == 8 * 4 * 2
    assert own["model.layers.3.mlp.down_proj.lora_A.weight"].shape == (4, 344)
    assert own["model.layers.3.mlp.down_proj.lora_B.weight"].shape == (128, 4)
    assert not any("o_proj" in name for name in own)
    assert all(torch.equal(weight, again.trained_weights()[name]) for name, weight in own.items())
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert not torch.equal(own[name], other.trained_weights()[name])
    assert own[name].std().item() == pytest.approx(128**-0.5, rel=0.1)
    assert [p.requires_grad for p in model.named_weights().values()] == [False] * len(model.named_weights())


def test_merged_weights_are_the_same_network():
    model = adapted()
    merged = Llama(model.config)
    merged.load_weights(model.merged_weights())
    ours, theirs = logits_of(model, model), logits_of(merged, merged)
    assert (ours - logits_of(*(build_toy(0),) * 2)).abs().max() > 0.01, "the adapters say something"
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [SOME, LoraConfig(), LoraConfig(targets=("k_proj",))], ids=["some", "all", "one"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str)
def test_the_llama_for_sampling_adds_what_the_llama_adds(config, dtype, tolerance):
    model = adapted(config, dtype)
    packed = PackedLlama(model)
    packed.pack()
    teach(model, 6)
    packed.pack_adapters()
    ours, plain = logits_of(model, packed), logits_of(model, model)
    assert (ours - plain).abs().max() < tolerance * plain.abs().max()


@pytest.mark.parametrize("rank", [1, 3, 16])
def test_aligned_rows_do_not_depend_on_their_neighbours(rank):
    try:
        self_test(rank=rank)
    except NumericsUnavailable as refusal:
        pytest.skip(str(refusal))


def test_what_cannot_be_adapted_is_refused():
    with pytest.raises(
        ValidationError, match="no projection query, lm_head: a layer has q_proj, k_proj, v_proj, o_proj"
    ):
        LoraConfig(targets=("query", "q_proj", "lm_head"))
    with pytest.raises(ValidationError, match="name each once"):
        LoraConfig(targets=("q_proj", "q_proj"))
    with pytest.raises(ValidationError, match="at least 1"):
        LoraConfig(targets=())
    with pytest.raises(ValueError, match="adapters already"):
        adapted().adapt(SOME)


def test_a_checkpoint_is_merged_and_has_the_adapters_beside_it(tmp_path):
    model = build_toy(0)
    model.adapt(SOME, base_name="owner/name")
    teach(model, 5)
    save_checkpoint(model, tmp_path / "checkpoint")
    back = load_checkpoint(tmp_path / "checkpoint")
    assert all(torch.equal(weight, back.named_weights()[name]) for name, weight in model.merged_weights().items())
    config = json.loads((tmp_path / "checkpoint/adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 12.0)
    assert config["target_modules"] == ["q_proj", "v_proj", "up_proj", "down_proj"]
    assert config["base_model_name_or_path"] == "owner/name"
    tensors = load_file(tmp_path / "checkpoint/adapter/adapter_model.safetensors")
    assert tensors.keys() == {f"base_model.model.{name}" for name in model.trained_weights()}
