"""Exported adapters are read by PEFT, and give with the frozen checkpoint what our network gives. Skipped without `peft`."""

import pytest
import torch

from everlong.models.adapter_config import LoraConfig
from everlong.models.attention import TreeAttention
from everlong.models.checkpoint import save_checkpoint
from everlong.models.toy import build_toy

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("targets", [LoraConfig().targets, ("q_proj", "down_proj")], ids=["all", "two"])
def test_peft_reads_our_adapters(tmp_path, targets):
    model = build_toy(0)
    save_checkpoint(model, tmp_path / "frozen")
    model.adapt(LoraConfig(rank=4, alpha=10.0, targets=targets), base_name=str(tmp_path / "frozen"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.trained_weights().values():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.05)
    save_checkpoint(model, tmp_path / "checkpoint")
    ids = torch.randint(0, 256, (30,), generator=generator)
    with torch.no_grad():
        attend = TreeAttention([(-1, 0, 30)], model.config.head_dim**-0.5, model.numerics)
        ours = model.logits(model(ids, torch.arange(30), attend))
        read = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "checkpoint/adapter", dtype=torch.float32)
        merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
        frozen = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "frozen", dtype=torch.float32)
        for theirs in (read, merged):
            torch.testing.assert_close(theirs(ids[None]).logits[0], ours, rtol=1e-4, atol=1e-4)
        assert (frozen(ids[None]).logits[0] - ours).abs().max() > 0.01
    assert read.peft_config["default"].r == 4
