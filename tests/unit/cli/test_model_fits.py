"""What a model's family decides of a run's settings, also where the model is known only once its files are opened."""

import json
from pathlib import Path

import pytest

from everlong.cli import start_checks
from everlong.cli.config import RunConfig
from everlong.cli.model_fits import refuse_misfit
from everlong.engines.config import EmbeddedConfig, PoolConfig, VllmConfig
from everlong.models.adapter_config import LoraConfig
from everlong.models.config import FolderModel, ToyMoeModel
from everlong.models.source import toy_config, toy_moe_config
from everlong.observe import SILENT
from everlong.trainer.config import ReplayConfig

DENSE, EXPERTS = toy_config(), toy_moe_config(ToyMoeModel())
ROLLOUT = ReplayConfig(routes="rollout")


def of_folder(**settings):
    return RunConfig(model=FolderModel(path=Path("somewhere")), **settings)


@pytest.mark.parametrize(
    ("settings", "shape", "message"),
    [
        (
            {"replay": ROLLOUT},
            DENSE,
            "replay.routes=rollout needs a model with routers, and model.type=folder has none",
        ),
        ({"engine": VllmConfig()}, EXPERTS, "model.type=folder has experts"),
        ({"engine": PoolConfig(members=(EmbeddedConfig(), VllmConfig()))}, EXPERTS, "model.type=folder has experts"),
        ({"adapter": LoraConfig(targets=("q_proj", "up_proj"))}, EXPERTS, "adapter.targets name up_proj, and"),
    ],
    ids=["replay", "vllm", "pool", "adapters"],
)
def test_what_a_family_cannot_follow_is_refused_when_the_model_is_opened(settings, shape, message):
    with pytest.raises(ValueError, match=message):
        refuse_misfit(of_folder(**settings), shape)
    other = EXPERTS if shape is DENSE else DENSE
    refuse_misfit(of_folder(**settings), other)


def test_a_start_opens_the_model_and_asks(tmp_path: Path):
    for name, content in (
        ("config.json", json.dumps(DENSE.to_hf())),
        ("model.safetensors", ""),
        ("tokenizer.json", "{}"),
    ):
        (tmp_path / name).write_text(content)
    config = RunConfig(model=FolderModel(path=tmp_path), replay=ROLLOUT)
    with pytest.raises(ValueError, match="model.type=folder has none"):
        start_checks._check_model(config, SILENT, dry=True)


def test_a_toy_with_experts_says_what_an_engine_must_record():
    recorded = {
        (routes, weights): ReplayConfig(routes=routes, weights=weights).recorded(EXPERTS.decisions)
        for routes in ("none", "rollout", "recompute")
        for weights in ("recomputed", "recorded")
    }
    assert recorded.pop(("rollout", "recomputed")) == ("experts",)
    assert recorded.pop(("rollout", "recorded")) == ("experts", "expert_weights")
    assert set(recorded.values()) == {()}
