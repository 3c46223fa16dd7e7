"""From episodes with forks to a gradient: how the packer cuts a batch does not show in what is learned."""

import numpy as np
import pytest
import torch

from everlong.contracts.errors import Reason
from everlong.contracts.records import Episode, EpisodeOrder, FinishReason, Purpose, ScoredGroup, Turn, Verdict
from everlong.contracts.tokens import TokenColumns
from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.trainer.config import (
    GspoConfig,
    GspoTokenConfig,
    RatioConfig,
    ReinforceConfig,
    SapoConfig,
    SequenceGeometric,
)
from everlong.trainer.objective import Objective
from everlong.trainer.preparation import prepare_batch
from everlong.trainer.step import batch_gradient
from everlong.trainer.tally import Tally
from everlong.trajectories.admission import AdmissionConfig
from everlong.trajectories.packing import PackingConfig, pack_batch

SHAPE = LlamaConfig(
    vocab_size=50, padded_vocab_size=56, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, max_positions=256,
)  # fmt: skip
PARENTS = (-1, 0, 1, 1, 0)
"""Turns of an episode: two forks, three leaves."""


def tiny():
    model = Llama(SHAPE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_weights().items():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + ("norm" in name))
    return model


def episode_of(group, attempt, prompt, rng):
    turns = []
    for index, parent in enumerate(PARENTS):
        context = prompt if parent < 0 else rng.integers(0, 50, rng.integers(1, 6))
        count = int(rng.integers(1, 9))
        sampled = TokenColumns.sampled_tokens(rng.integers(0, 50, count), -rng.random(count) * 4, version=0)
        turns.append(
            Turn(
                index=index,
                parent=parent,
                context=TokenColumns.context(context),
                sampled=sampled,
                finish_reason=FinishReason.STOP,
            )
        )
    verdict = Verdict(reward=None, reason=Reason.VERIFIER_CRASH) if attempt == 1 else Verdict(reward=float(attempt))
    order = EpisodeOrder(task=f"t{group}", group=group, attempt=attempt, purpose=Purpose.TRAIN)
    return Episode(order=order, reason=Reason.DONE, verdict=verdict, turns=tuple(turns))


def some_groups():
    rng = np.random.default_rng(0)
    groups = []
    for group in range(3):
        prompt = rng.integers(0, 50, 12)
        episodes = tuple(episode_of(group, attempt, prompt, rng) for attempt in range(3))
        groups.append(ScoredGroup(group=group, task=f"t{group}", episodes=episodes, credits=(1.0, None, -0.7)))
    return groups


WIDE = {"clip_low": 0.9, "clip_high": 9.0}
GEOMETRIC = RatioConfig(correction=SequenceGeometric(low=0.1, high=20.0), off_policy_drop=0.2)


@pytest.mark.parametrize(
    "objective",
    [
        *(Objective(SapoConfig(reduction=reduction), RatioConfig()) for reduction in ("token", "episode", "sequence", "group")),
        Objective(SapoConfig(reduction="constant", constant_length=20), RatioConfig()),
        Objective(GspoConfig(**WIDE), RatioConfig()),
        Objective(GspoTokenConfig(**WIDE, reduction="episode"), RatioConfig()),
        Objective(ReinforceConfig(), GEOMETRIC),
    ],
    ids=lambda objective: f"{objective.loss.type} {objective.loss.reduction} {objective.ratio.correction.type}",
)  # fmt: skip
def test_the_packing_limit_does_not_change_the_gradient(objective):
    model = tiny()
    results, passes, trained = [], [], []
    for limit in (10, 60, 150, 4096):
        packed = pack_batch(0, some_groups(), PackingConfig(micro_batch_tokens=limit), AdmissionConfig(), seed=0)
        batch = prepare_batch(packed.train_batch, objective, SHAPE)
        results.append(batch_gradient(model, batch, objective, None, 512, Tally()))
        passes.append(sum(-(-len(part.columns) // limit) for part in packed.train_batch.micro_batches))
        trained.append(batch.num_trained)
    assert passes[0] > passes[1] > passes[2] > passes[3] == 1
    sampled = sum(e.num_sampled for group in some_groups() for e in group.episodes if e.reward is not None)
    assert trained == [sampled] * 4
    for other in results[:-1]:
        assert other.loss == pytest.approx(results[-1].loss, rel=1e-5)
        for mine, theirs in zip(other.gradient, results[-1].gradient, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
