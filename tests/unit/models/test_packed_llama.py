"""The llama for sampling computes what the llama computes."""

import pytest
import torch

from everlong.models.attention import TreeAttention
from everlong.models.head import logits_of
from everlong.models.llama.model import Llama
from everlong.models.llama.packed import PackedLlama
from everlong.models.numerics import Numerics
from everlong.models.toy import build_toy

NUM_TOKENS = 40


def logits_of_both(model: Llama, packed: PackedLlama) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 256, (NUM_TOKENS,), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(7, 7 + NUM_TOKENS)

    def attend() -> TreeAttention:
        return TreeAttention([(-1, 0, NUM_TOKENS)], model.config.head_dim**-0.5, Numerics.FAST)

    with torch.inference_mode():
        plain = logits_of(model(ids, positions, attend()), model.head_weight, model.config, Numerics.FAST)
        return packed.logits(packed(ids, positions, attend()))[:, :260], plain[:, :260]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)], ids=str)
def test_packed_weights_give_the_logits_of_the_model(dtype: torch.dtype, tolerance: float):
    model = build_toy(0, dtype)
    packed = PackedLlama(model)
    packed.pack()
    ours, plain = logits_of_both(model, packed)
    assert plain.std() > 0.1
    assert (ours - plain).abs().max() < tolerance * plain.abs().max()


def test_weights_that_changed_count_once_they_are_packed_again():
    model = build_toy(0)
    packed = PackedLlama(model)
    packed.pack()
    model.load_weights(build_toy(1).named_weights())
    packed.pack()
    ours, plain = logits_of_both(model, packed)
    assert torch.allclose(ours, plain, atol=1e-5)


def test_what_onednn_does_not_take_is_multiplied_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = build_toy(0)
    packed = PackedLlama(model)
    packed.pack()
    ours, plain = logits_of_both(model, packed)
    assert torch.allclose(ours, plain, atol=1e-5)
