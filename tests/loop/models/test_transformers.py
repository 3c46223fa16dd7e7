"""Our network against the one of transformers, whose import takes seconds."""

import pytest
import torch

from everlong.models.attention import TreeAttention
from everlong.models.checkpoint import load_checkpoint, save_checkpoint
from everlong.models.config import ToyMoeModel
from everlong.models.head import logits_of
from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.models.moe.config import MoeConfig
from everlong.models.numerics import Numerics
from everlong.models.source import toy_moe_config
from everlong.models.toy import build_toy, random_llama

transformers = pytest.importorskip("transformers")


def our_logits(model: Llama, ids: torch.Tensor) -> torch.Tensor:
    attend = TreeAttention([(-1, 0, len(ids))], model.config.head_dim**-0.5, model.numerics)
    with torch.no_grad():
        hidden = model(ids, torch.arange(len(ids)), attend)
        return logits_of(hidden, model.head_weight, model.config, model.numerics)


def enlarged_toy(numerics: Numerics) -> Llama:
    return enlarged(build_toy(1, numerics=numerics))


def enlarged(model: Llama) -> Llama:
    """With larger weights, so that attention is far from uniform and an error would show."""
    with torch.no_grad():
        for name, weight in model.named_weights().items():
            if "norm" not in name:
                weight.mul_(5)
    return model


@pytest.mark.parametrize("numerics", list(Numerics))
def test_saved_toy_gives_the_same_logits_in_transformers(tmp_path, numerics):
    model, ids = enlarged_toy(numerics), torch.randint(0, 260, (90,), generator=torch.Generator().manual_seed(0))
    save_checkpoint(model, tmp_path / "toy")
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "toy", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    ours = our_logits(model, ids)
    assert expected.std() > 0.5
    torch.testing.assert_close(ours[:, :260], expected[:, :260], rtol=1e-4, atol=1e-4)
    assert ours[:, 260:].eq(-torch.inf).all()


def test_checkpoint_written_by_transformers_loads(tmp_path):
    """Untied, with its own head and fewer key than query heads."""
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, tie_word_embeddings=False, rope_theta=5000.0, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_checkpoint(tmp_path / "theirs")
    assert model.config == LlamaConfig.from_hf(config.to_dict())
    ids = torch.randint(0, 50, (70,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(our_logits(model, ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("numerics", list(Numerics))
def test_the_saved_toy_with_experts_gives_the_same_logits_as_mixtral_in_transformers(tmp_path, numerics):
    model = enlarged(random_llama(toy_moe_config(ToyMoeModel()), 1, numerics=numerics))
    ids = torch.randint(0, 260, (90,), generator=torch.Generator().manual_seed(0))
    save_checkpoint(model, tmp_path / "toy")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "toy", dtype=torch.float32)
    assert type(theirs).__name__ == "MixtralForCausalLM"
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(our_logits(model, ids)[:, :260], expected[:, :260], rtol=1e-4, atol=1e-4)


def test_what_transformers_would_compute_otherwise_it_does_not_load(tmp_path):
    model = random_llama(toy_moe_config(ToyMoeModel(router="sigmoid")), 1)
    save_checkpoint(model, tmp_path / "toy")
    with pytest.raises(ValueError, match="everlong_moe"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "toy")


def test_a_checkpoint_of_mixtral_written_by_transformers_loads(tmp_path):
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=3, rope_theta=5000.0, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.MixtralForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    model = load_checkpoint(tmp_path / "theirs")
    assert isinstance(model.config, MoeConfig)
    assert (model.config.num_experts, model.config.experts_per_token) == (5, 3)
    ids = torch.randint(0, 50, (70,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
    torch.testing.assert_close(our_logits(model, ids), expected, rtol=1e-4, atol=1e-4)
