"""Trainers that are the same on every rank, in the settings of the tests: what a follower's process builds too."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import torch
from tests.unit.trainer.tiny import SHAPE, tiny_moe

from everlong.contracts.records import EpisodeShare, MicroBatch, Segment, TrainBatch
from everlong.contracts.tokens import TokenColumns
from everlong.models.adapter_config import LoraConfig
from everlong.models.llama.model import Llama
from everlong.storage import open_store
from everlong.trainer.clamp_config import HiddenClamp, WeightClamp
from everlong.trainer.config import (
    AdamWConfig,
    CriticConfig,
    GrpoConfig,
    KlLoss,
    MuonConfig,
    PpoConfig,
    RatioConfig,
    ReplayConfig,
    SapoConfig,
    TokenTruncation,
    TrainerConfig,
)
from everlong.trainer.trainer import PolicyTrainer
from everlong.weights import WeightPublisher

FACTORY = "tests.loop.trainer.ranked:build"
SETTINGS = {
    "critic and hidden clamp": {
        "config": TrainerConfig(gradient_clamp=HiddenClamp(share=0.05)),
        "loss": PpoConfig(),
        "kl": KlLoss(),
        "critic": CriticConfig(learning_rate=1e-2),
        "optimizer": AdamWConfig(learning_rate=1e-2, weight_decay=0.1, warmup_steps=2),
    },
    "muon, two updates": {
        "config": TrainerConfig(updates_per_batch=2, gradient_clamp=WeightClamp(share=0.01)),
        "loss": GrpoConfig(),
        "ratio": RatioConfig(base="proximal", correction=TokenTruncation()),
        "optimizer": MuonConfig(learning_rate=1e-2, per_head=True, qk_clip=1.0, max_grad_norm=0.1),
    },
    "routes of the first pass, hidden clamp": {
        "config": TrainerConfig(updates_per_batch=2, gradient_clamp=HiddenClamp(share=0.05)),
        "loss": GrpoConfig(),
        "ratio": RatioConfig(base="proximal", correction=TokenTruncation()),
        "kl": KlLoss(),
        "replay": ReplayConfig(routes="recompute"),
        "optimizer": AdamWConfig(learning_rate=1e-2),
    },
    "adapters": {"loss": SapoConfig(), "optimizer": AdamWConfig(learning_rate=1e-2)},
    "breaks": {"loss": SapoConfig(), "optimizer": AdamWConfig()},
}


def build(path, ranks):
    """The trainer that the file at `path` describes."""
    torch.set_num_threads(1)
    about = json.loads(Path(path).read_text())
    name = about["settings"]
    if name == "breaks" and ranks.rank:
        raise ValueError("no room for another model")
    store, settings = open_store(about["store"]), {"config": TrainerConfig(), "ratio": RatioConfig(), **SETTINGS[name]}
    model = tiny_moe() if "routes" in name else untied(torch.bfloat16 if "muon" in name else torch.float32)
    if name == "adapters":
        model.adapt(LoraConfig(rank=2))
    publisher = WeightPublisher(store, anchor_every=10)
    return PolicyTrainer(
        model, numerics=model.numerics, store=store, publisher=publisher, seed=7, lease=asyncio.Lock(), ranks=ranks,
        **settings,
    )  # fmt: skip


def untied(dtype):
    """A tiny llama with a head of its own."""
    model = Llama(replace(SHAPE, tie_embeddings=False), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_weights().items():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.4 + ("norm" in name))
    return model


def a_batch(number, num_micro_batches=5, returns=False):
    """One micro-batch per group; the second trains nothing, the last imitates."""
    rng = np.random.default_rng(number)
    micro_batches, shares = [], []
    for group in range(num_micro_batches):
        prompt, answers = TokenColumns.context(rng.integers(0, 11, 3)), []
        for attempt in range(2):
            ids = rng.integers(0, 11, int(rng.integers(2, 7)))
            if group and group == num_micro_batches - 1:
                answers.append(TokenColumns.supervised(ids))
                continue
            answer = TokenColumns.sampled_tokens(ids, -rng.random(len(ids)) - 1, version=number)
            answer = answer.with_credit(1.0 - 1.5 * attempt)
            if returns:
                answer = answer.replace(returns=np.full(len(ids), 0.5 - attempt, np.float32))
            answers.append(answer.freeze() if group == 1 else answer)
        segments, at = [Segment(parent=-1, start=0, length=len(prompt), episode=-1)], len(prompt)
        for answer in answers:
            segments.append(Segment(parent=0, start=at, length=len(answer), episode=len(shares)))
            shares.append(EpisodeShare(episode=f"e{len(shares)}", group=group, num_trainable=answer.num_trainable))
            at += len(answer)
        micro_batches.append(MicroBatch(columns=TokenColumns.join([prompt, *answers]), segments=tuple(segments)))
    return TrainBatch(batch=number, micro_batches=tuple(micro_batches), episodes=tuple(shares))


def without_times(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("seconds/")}


def reversed_groups(batch):
    """The same micro-batches in the other order."""
    return msgspec.structs.replace(batch, micro_batches=batch.micro_batches[::-1])
