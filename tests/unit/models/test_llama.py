"""The llama's shape, names and weights, and the checkpoint folder."""

import json
from pathlib import Path

import pytest
import torch

from everlong.models.attention import TreeAttention
from everlong.models.checkpoint import load_checkpoint, save_checkpoint
from everlong.models.head import logits_of
from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.models.numerics import Numerics
from everlong.models.toy import build_toy, toy_config

SMALL = LlamaConfig(
    vocab_size=20, padded_vocab_size=24, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=4, tie_embeddings=False, max_positions=64, rope_theta=5000.0,
)  # fmt: skip


def small(dtype: torch.dtype = torch.float32) -> Llama:
    model = Llama(SMALL, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    model.load_weights(
        {n: torch.randn(w.shape, generator=generator).to(dtype) for n, w in model.named_weights().items()}
    )
    return model


def test_the_toy_is_a_byte_llama_of_one_and_a_half_million_weights():
    config = toy_config()
    assert (config.vocab_size, config.padded_vocab_size, config.num_layers, config.hidden_size) == (260, 264, 8, 128)
    assert sum(w.numel() for w in build_toy(0).named_weights().values()) == 1_485_952


def test_a_seed_gives_the_same_toy_and_another_seed_another():
    ours, again, other = (build_toy(seed).named_weights() for seed in (3, 3, 4))
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert not any(torch.equal(ours[name], other[name]) for name in ours if ours[name].ndim == 2)
    rounded = build_toy(3, dtype=torch.bfloat16).named_weights()
    assert all(torch.equal(rounded[name], ours[name].bfloat16()) for name in ours)


def test_config_survives_the_round_trip_through_config_json():
    assert LlamaConfig.from_hf(json.loads(json.dumps(SMALL.to_hf()))) == SMALL


def test_padding_of_anothers_checkpoint_is_told_by_the_tokenizer():
    """Their config.json knows the rows only; without a tokenizer's size every row counts as a token."""
    theirs = {key: value for key, value in SMALL.to_hf().items() if key != "unpadded_vocab_size"}
    assert LlamaConfig.from_hf(theirs).vocab_size == 24
    assert LlamaConfig.from_hf(theirs, vocab_size=20) == SMALL


def test_rope_theta_is_found_in_either_place():
    nested = {key: value for key, value in SMALL.to_hf().items() if key != "rope_theta"}
    nested["rope_parameters"] = {"rope_type": "default", "rope_theta": 500000.0}
    assert LlamaConfig.from_hf(SMALL.to_hf()).rope_theta == 5000.0
    assert LlamaConfig.from_hf(nested).rope_theta == 500000.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "expected a llama checkpoint, .*'qwen2'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "'llama3' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
    ids=["family", "bias", "scaled rope", "rope type", "activation"],
)
def test_a_config_that_the_family_does_not_honour_is_refused(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        LlamaConfig.from_hf({**SMALL.to_hf(), **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"padded_vocab_size": 19}, "padded_vocab_size 19 is below vocab_size 20"),
        ({"num_kv_heads": 3}, "no multiple"),
        ({"head_dim": 5}, "even"),
    ],
    ids=["padding", "heads", "odd width"],
)
def test_an_impossible_shape_is_refused(change: dict, message: str):
    fields = {name: getattr(SMALL, name) for name in LlamaConfig.__slots__}
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**{**fields, **change})


def test_weights_load_into_the_storage_that_is_there():
    model, other = small(), small()
    places = {name: weight.data_ptr() for name, weight in model.named_weights().items()}
    model.load_weights({name: weight + 1 for name, weight in other.named_weights().items()})
    for name, weight in model.named_weights().items():
        assert weight.data_ptr() == places[name]
        assert torch.equal(weight, other.named_weights()[name] + 1)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "dtype"])
def test_weights_that_do_not_fit_change_nothing(fault: str):
    model = small()
    before = {name: weight.clone() for name, weight in model.named_weights().items()}
    weights = {name: weight + 1 for name, weight in before.items()}
    last = "lm_head.weight"
    if fault == "missing":
        del weights[last]
    elif fault == "unknown":
        weights["model.layers.9.mlp.up_proj.weight"] = torch.zeros(1)
    else:
        weights[last] = weights[last][:-1] if fault == "shape" else weights[last].double()
    named = "layers.9" if fault == "unknown" else "lm_head.weight"
    with pytest.raises(ValueError, match=named):
        model.load_weights(weights)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_weights().items())


def test_the_head_is_tied_or_its_own():
    toy, own = build_toy(0), small()
    assert toy.head_weight is toy.named_weights()["model.embed_tokens.weight"]
    assert own.head_weight is own.named_weights()["lm_head.weight"]
    assert "lm_head.weight" not in toy.named_weights()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("numerics", Numerics)
def test_hidden_states_are_float32_and_finite(dtype: torch.dtype, numerics: Numerics):
    model = build_toy(0, dtype=dtype, numerics=numerics)
    ids = torch.arange(40)
    hidden = model(ids, torch.arange(40), TreeAttention([(-1, 0, 40)], 32**-0.5, numerics))
    assert hidden.dtype == torch.float32
    assert hidden.isfinite().all()
    logits_of(hidden, model.head_weight, model.config, numerics)[:, :260].sum().backward()
    assert all(w.grad is not None and w.grad.isfinite().all() for w in model.named_weights().values())


def test_positions_count_only_by_their_distance():
    model = small()
    ids = torch.arange(12)
    near, far = (
        model(ids, torch.arange(12) + shift, TreeAttention([(-1, 0, 12)], 0.5, Numerics.FAST)) for shift in (0, 40)
    )
    assert torch.allclose(near, far, atol=1e-4)
    stretched = model(ids, torch.arange(12) * 2, TreeAttention([(-1, 0, 12)], 0.5, Numerics.FAST))
    assert (stretched - near).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_model_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype):
    model = small(dtype)
    save_checkpoint(model, tmp_path / "kept" / "model", {"tokenizer.json": b"{}"})
    assert (tmp_path / "kept" / "model" / "tokenizer.json").read_text() == "{}"
    back = load_checkpoint(tmp_path / "kept" / "model")
    assert back.config == SMALL
    assert back.dtype == dtype
    own = model.named_weights()
    assert all(torch.equal(weight, own[name]) for name, weight in back.named_weights().items())
    assert load_checkpoint(tmp_path / "kept" / "model", dtype=torch.float32).dtype == torch.float32


def test_a_checkpoint_is_written_whole_or_not_at_all(tmp_path: Path):
    target = tmp_path / "model"
    with pytest.raises(FileNotFoundError):
        save_checkpoint(small(), target, {"no-such-folder/tokenizer.json": b"{}"})
    assert list(tmp_path.iterdir()) == []
    save_checkpoint(small(), target)
    with pytest.raises(FileExistsError, match="choose another folder"):
        save_checkpoint(small(), target)


def test_a_folder_without_a_checkpoint_is_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_checkpoint(tmp_path)
