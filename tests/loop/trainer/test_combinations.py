"""Every loss with every base, correction and KL term: it trains a step, or it is refused by name, as docs/losses.md says."""

import asyncio
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from tests.unit.trainer.tiny import SHAPE, tiny

from everlong.cli.config import RunConfig
from everlong.contracts.records import EpisodeShare, MicroBatch, ScoreRequest, Segment, TrainBatch
from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.models.adapter_config import LoraConfig
from everlong.storage import open_store
from everlong.trainer.config import (
    AdamWConfig,
    CispoConfig,
    CriticConfig,
    DapoConfig,
    DoubleSidedMask,
    DrGrpoConfig,
    GrpoConfig,
    GspoConfig,
    GspoTokenConfig,
    KimiConfig,
    KlLoss,
    KlReward,
    MisPo,
    NoCorrection,
    PpoConfig,
    RatioConfig,
    ReinforceConfig,
    SapoConfig,
    SequenceGeometric,
    SequenceProduct,
    TokenMask,
    TokenTruncation,
    TrainerConfig,
    check_effective,
    level_of,
)
from everlong.trainer.kl_config import WITHOUT_KL
from everlong.trainer.objective import Objective
from everlong.trainer.preparation import prepare_batch
from everlong.trainer.step import batch_gradient, reference_logprobs
from everlong.trainer.tally import Tally
from everlong.trainer.trainer import PolicyTrainer
from everlong.trajectories.credit import GaeConfig, credit_from_values
from everlong.weights import WeightPublisher

WIDE = {"clip_low": 0.9, "clip_high": 90.0}
LOSSES = [
    ReinforceConfig(),
    GrpoConfig(),
    GrpoConfig(level="sequence"),
    GrpoConfig(level="sequence_token"),
    PpoConfig(),
    DrGrpoConfig(),
    DapoConfig(),
    CispoConfig(),
    CispoConfig(level="sequence"),
    GspoConfig(**WIDE),
    GspoTokenConfig(**WIDE),
    SapoConfig(),
    KimiConfig(),
]
CORRECTIONS = [
    NoCorrection(),
    TokenTruncation(),
    TokenMask(low=0.01, high=90.0),
    DoubleSidedMask(low=0.01, high=90.0),
    MisPo(token_low=None, token_high=None, sequence_low=0.01, sequence_high=90.0),
    SequenceProduct(),
    SequenceGeometric(low=0.01, high=90.0),
]
KLS = [WITHOUT_KL, KlLoss(), KlReward(support="full")]


def name_of(loss):
    level = level_of(loss)
    return loss.type if level == "token" or loss.type.startswith("gspo") else f"{loss.type}, level {level}"


def a_batch():
    """One prompt, an episode of two branches that share a turn, another with a supervised tail; kept sets on some."""
    kept = KeptSets.from_rows([[1, 4, 7], [], [5]])
    pieces = [
        (-1, -1, 0, TokenColumns.context([3, 9, 2])),
        (0, 0, 0, TokenColumns.sampled_tokens([2, 3], [-1.5, -2.5], version=0, temperature=0.7).with_credit(0.8)),
        (1, 0, 0, TokenColumns.sampled_tokens([4, 8, 5], [-1.0, -3.0, 0.0], version=0, kept=kept).with_credit(0.8)),
        (1, 0, 1, TokenColumns.sampled_tokens([5, 6], [-2.0, -1.0], version=0).with_credit(0.8)),
        (0, 1, 0, TokenColumns.sampled_tokens([7, 1], [-2.0, -2.2], version=0).with_credit(-1.1)),
        (4, 1, 0, TokenColumns.supervised([7, 10])),
    ]
    segments, at = [], 0
    for parent, episode, branch, columns in pieces:
        segments.append(Segment(parent=parent, start=at, length=len(columns), episode=episode, branch=branch))
        at += len(columns)
    columns = TokenColumns.join([piece[3] for piece in pieces])
    shares = [EpisodeShare(episode=f"e{i}", group=0, num_trainable=n) for i, n in enumerate((7, 4))]
    return TrainBatch(
        batch=0, micro_batches=(MicroBatch(columns=columns, segments=tuple(segments)),), episodes=tuple(shares)
    )


def refusal(loss, ratio, kl=WITHOUT_KL):
    """What is said, or None; the proximal base with two updates per batch."""
    try:
        check_effective(loss, ratio, 2 if ratio.base == "proximal" else 1, kl)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_every_combination_trains_or_is_refused_by_name(loss):
    num_trained = num_refused = 0
    for base in ("behaviour", "proximal"):
        for correction in CORRECTIONS:
            for kl in KLS:
                ratio = RatioConfig(base=base, correction=correction, off_policy_drop=5.0)
                refused = refusal(loss, ratio, kl)
                if refused is not None:
                    words = (loss.type, f"ratio.base={base}", correction.type, f"kl.type={kl.type}")
                    assert sum(word in refused for word in words) >= 2, refused
                    num_refused += 1
                    continue
                trains(Objective(loss, ratio, kl))
                num_trained += 1
    assert num_trained >= 12 and num_refused >= 12


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_every_loss_trains_adapters(loss):
    for kl in KLS:
        if refusal(loss, RatioConfig(), kl) is None:
            model = tiny()
            model.adapt(LoraConfig(rank=2))
            before = {name: weight.detach().clone() for name, weight in model.named_weights().items()}
            trains(Objective(loss, RatioConfig(), kl), model)
            assert all(torch.equal(weight, before[name]) for name, weight in model.named_weights().items())


@pytest.mark.parametrize("adapter", [None, LoraConfig(rank=2)], ids=["whole", "lora"])
@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
async def test_every_loss_on_a_token_s_own_ratio_trains_beside_a_critic(loss, adapter):
    """A branch's one ratio has one credit, and is refused by name."""
    settings = {"loss": loss, "credit": GaeConfig(discount=0.9)}
    if level_of(loss) == "sequence":
        with pytest.raises(ValueError, match=f"credit.type=gae .* loss {loss.type} has one ratio"):
            RunConfig(**settings)
        return
    RunConfig(**settings)
    model, store = tiny(), open_store("memory://")
    if adapter is not None:
        model.adapt(adapter)
    trainer = PolicyTrainer(
        model, config=TrainerConfig(), loss=loss, ratio=RatioConfig(), optimizer=AdamWConfig(), critic=CriticConfig(),
        numerics=model.numerics, store=store, publisher=WeightPublisher(store, 10), seed=0, lease=asyncio.Lock(),
    )  # fmt: skip
    batch = a_batch()
    shares = tuple(replace(share, reward=1.0 - i) for i, share in enumerate(batch.episodes))
    batch = replace(batch, episodes=shares)
    scores = await trainer.score(ScoreRequest(micro_batches=batch.micro_batches, wanted=("values",)))
    metrics = (await trainer.train(credit_from_values(batch, scores, settings["credit"]))).metrics
    assert 0 < metrics["grad_norm"] < 1e6 and 0 < metrics["critic/grad_norm"] < 1e6


def trains(objective, model=None):
    """Two gradients, the second at weights that have moved, both finite and not zero."""
    model = model or tiny()
    batch = prepare_batch(a_batch(), objective, SHAPE)
    reference = None if objective.kl.type == "none" else reference_logprobs(model, batch, objective, 512)
    starts = None
    for _ in range(2):
        step = batch_gradient(model, batch, objective, starts, 512, Tally(), reference)
        assert all(part.isfinite().all() for part in step.gradient), objective
        assert max(part.abs().max() for part in step.gradient) > 1e-4, objective
        starts = starts or (step.starts if objective.ratio.base == "proximal" else None)
        with torch.no_grad():
            for weight, part in zip(model.trained_weights().values(), step.gradient, strict=True):
                weight.sub_(0.01 * part)


def table():
    """Which correction goes with which loss, on which base."""
    lines = [
        "| loss | " + " | ".join(f"`{correction.type}`" for correction in CORRECTIONS) + " |",
        "|---" * (len(CORRECTIONS) + 1) + "|",
    ]
    for loss in LOSSES:
        cells = []
        for correction in CORRECTIONS:
            bases = [
                base
                for base in ("behaviour", "proximal")
                if refusal(loss, RatioConfig(base=base, correction=correction)) is None
            ]
            cells.append(", ".join(bases) or "refused")
        lines.append(f"| {name_of(loss)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_page_s_table_is_the_one_that_the_settings_make():
    page = (Path(__file__).parents[3] / "docs/losses.md").read_text(encoding="utf-8")
    assert table() in page, f"docs/losses.md needs this table:\n{table()}"
