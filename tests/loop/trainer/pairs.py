"""Every loss with every correction, replay, credit, cut and kind of weights: what trains a step, and what is refused by which name.

    python -m tests.loop.trainer.pairs > docs/pairs.md

The settings decide as a run's own do. What they take trains on a llama of two small layers: two episodes, one of two branches that
share a turn, whose recorded logprobs are a little off the network's own. No token is supervised, so that nothing but the objective
gives a gradient.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from msgspec.structs import replace
from pydantic import ValidationError
from tests.loop.trainer.test_combinations import CORRECTIONS, LOSSES, name_of
from tests.unit.trainer.tiny import SHAPE, tiny

from everlong.cli.config import RunConfig, SamplingConfig
from everlong.contracts.records import EpisodeShare, MicroBatch, Segment, TrainBatch
from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.models.adapter_config import LoraConfig, NoAdapter
from everlong.models.llama.model import Llama
from everlong.trainer.config import (
    AdamWConfig,
    AnyCorrection,
    AnyLoss,
    CriticConfig,
    DrGrpoConfig,
    RatioConfig,
    TrainerConfig,
    level_of,
)
from everlong.trainer.critic import Critic, value_gradient
from everlong.trainer.gradient_sum import Gradient
from everlong.trainer.objective import Objective
from everlong.trainer.preparation import prepare_batch
from everlong.trainer.scoring import score_micro_batch
from everlong.trainer.step import Start, batch_gradient
from everlong.trainer.tally import Tally
from everlong.trajectories.credit import GaeConfig, GroupMeanConfig

BASES = ("behaviour", "proximal")
CHUNK = 512


@dataclass(frozen=True)
class Cut:
    """How the batch comes to the trainer."""

    kept: bool
    """Kept sets are recorded, and replayed."""
    valued: bool
    """Credit differs from token to token, and a critic has targets."""
    shared: bool
    """What branches and episodes share is stored once."""
    adapted: bool
    """Adapters train beside frozen weights."""

    @property
    def words(self) -> tuple[str, ...]:
        return (
            "kept sets" if self.kept else "whole vocabulary",
            "`credit.type` gae" if self.valued else "`credit.type` group_mean",
            "shared once" if self.shared else "flat",
            "`adapter.type` lora" if self.adapted else "every weight",
        )


CUTS = tuple(Cut(*choice) for choice in itertools.product((False, True), repeat=4))
WORDS = tuple(itertools.chain.from_iterable(zip(CUTS[0].words, CUTS[-1].words, strict=True)))


@dataclass(frozen=True)
class Combination:
    loss: AnyLoss
    base: str
    correction: AnyCorrection
    cut: Cut

    @property
    def ratio(self) -> RatioConfig:
        return RatioConfig.model_validate({"base": self.base, "correction": self.correction})

    @property
    def objective(self) -> Objective:
        return Objective(self.loss, self.ratio)

    def names(self) -> tuple[str, ...]:
        """What a message may call it by."""
        level = level_of(self.loss)
        credit = "credit.type=gae" if self.cut.valued else "credit.type=group_mean"
        return (f"loss {self.loss.type}", f"ratio.base={self.base}", self.correction.type, credit, f"level={level}",
                "trainer.updates_per_batch")  # fmt: skip

    def refusal(self) -> str | None:
        """What a run with these settings is told; None where it starts."""
        of_group = GroupMeanConfig(scale="none") if isinstance(self.loss, DrGrpoConfig) else GroupMeanConfig()
        try:
            RunConfig(
                loss=self.loss,
                ratio=self.ratio,
                credit=GaeConfig() if self.cut.valued else of_group,
                adapter=LoraConfig(rank=2) if self.cut.adapted else NoAdapter(),
                sampling=SamplingConfig(top_p=0.9 if self.cut.kept else 1.0),
                trainer=TrainerConfig(updates_per_batch=2 if self.base == "proximal" else 1),
            )
        except ValidationError as error:
            return error.errors()[0]["msg"].removeprefix("Value error, ")
        return None


def combinations(losses: Sequence[AnyLoss] = LOSSES) -> Iterator[Combination]:
    for loss, base, correction, cut in itertools.product(losses, BASES, CORRECTIONS, CUTS):
        yield Combination(loss, base, correction, cut)


# One step ------------------------------------------------------------------------------------------------------------


@cache
def network(adapted: bool) -> Llama:
    model = tiny()
    if adapted:
        model.adapt(LoraConfig(rank=2))
        with torch.no_grad():  # or half of its factors would have no gradient yet
            for weight in model.trained_weights().values():
                weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(weight))))
    return model


PROMPT, TURN, LEFT, RIGHT, OTHER = ([3, 9, 2], [2, 3], [4, 8, 5], [5, 6], [7, 1, 10])
ROWS = {2: [2, 3, 7], 3: [3, 5], 4: [1, 4, 7], 8: [8, 0], 5: [5, 2], 6: [6, 10], 7: [7, 1], 1: [1], 10: [10, 9]}
"""Kept sets by sampled id; one leaves no choice."""


def sampled(ids: Sequence[int], kept: bool) -> TokenColumns:
    rows = KeptSets.from_rows([ROWS[i] for i in ids]) if kept else None
    return TokenColumns.sampled_tokens(ids, [-1.0] * len(ids), version=0, temperature=0.8, kept=rows)


def micro_batch(*pieces: tuple[int, int, int, TokenColumns]) -> MicroBatch:
    segments, at = [], 0
    for parent, episode, branch, columns in pieces:
        segments.append(Segment(parent=parent, start=at, length=len(columns), episode=episode, branch=branch))
        at += len(columns)
    return MicroBatch(columns=TokenColumns.join([piece[3] for piece in pieces]), segments=tuple(segments))


def micro_batches(cut: Cut) -> tuple[MicroBatch, ...]:
    prompt = TokenColumns.context(PROMPT)
    turn, left, right, other = (sampled(ids, cut.kept) for ids in (TURN, LEFT, RIGHT, OTHER))
    if cut.shared:
        pieces = (-1, -1, 0, prompt), (0, 0, 0, turn), (1, 0, 0, left), (1, 0, 1, right), (0, 1, 0, other)
        return (micro_batch(*pieces),)
    again = turn.freeze()
    return (
        micro_batch((-1, -1, 0, prompt), (0, 0, 0, turn + left)),
        micro_batch((-1, -1, 0, prompt), (0, 0, 1, again + right)),
        micro_batch((-1, -1, 0, prompt), (0, 1, 0, other)),
    )


def recorded(cut: Cut, part: MicroBatch) -> MicroBatch:
    """With what an engine and credit would have written: by id, so that a token has the same in every cut."""
    columns, own = part.columns, score_micro_batch(network(cut.adapted), part, CHUNK)
    noise = 0.05 * np.sin(1 + columns.ids)
    logprobs = np.where(columns.sampled, np.minimum(own + noise * (own < 0), 0), np.nan).astype(np.float32)
    owners = np.zeros(len(columns), int)
    for segment in part.segments:
        owners[segment.start : segment.start + segment.length] = segment.episode
    credit = np.where(owners == 1, -0.9, 0.7) + (0.2 * np.cos(columns.ids) if cut.valued else 0.0)
    returns = np.where(columns.trainable, 0.5 + 0.1 * credit, np.nan) if cut.valued else columns.returns
    streams = {"logprobs": logprobs, "credit": credit, "returns": returns}
    changed = {name: np.asarray(stream, np.float32) for name, stream in streams.items()}
    return replace(part, columns=columns.replace(**changed))


@cache
def batch_of(cut: Cut) -> TrainBatch:
    shares = tuple(EpisodeShare(episode=f"e{i}", group=0, num_trainable=n, reward=0.5) for i, n in enumerate((7, 3)))
    return TrainBatch(batch=0, micro_batches=tuple(recorded(cut, part) for part in micro_batches(cut)), episodes=shares)


@cache
def starts_of(cut: Cut) -> tuple[Start, ...]:
    """As if an update had been made since."""
    found = []
    for part in batch_of(cut).micro_batches:
        scores = score_micro_batch(network(cut.adapted), part, CHUNK)
        tokens = part.columns.trainable
        start = torch.from_numpy((scores - 0.03 * np.cos(part.columns.ids) * (scores < 0))[tokens].astype(np.float32))
        found.append(Start(start, start))
    return tuple(found)


def step(combination: Combination) -> Gradient:
    """The gradient of the policy's step."""
    cut, objective = combination.cut, combination.objective
    batch, model = prepare_batch(batch_of(cut), objective, SHAPE), network(cut.adapted)
    starts = starts_of(cut) if combination.base == "proximal" else None
    return batch_gradient(model, batch, objective, starts, CHUNK, Tally()).gradient


@cache
def critic_step(cut: Cut) -> Gradient:
    """That of the critic's step, which knows no loss and no correction."""
    critic = Critic(network(cut.adapted), CriticConfig(), AdamWConfig())
    critic.score(batch_of(cut).micro_batches[0])  # which makes the policy's weights its own
    batch = prepare_batch(batch_of(cut), Objective(LOSSES[0], RatioConfig()), SHAPE)
    return value_gradient(critic.network, batch).gradient


# The page ------------------------------------------------------------------------------------------------------------


def columns_of(combination: Combination) -> tuple[str, ...]:
    """Those of the page's tables in which a combination counts."""
    return (*combination.cut.words, f"`ratio.base` {combination.base}", f"`{combination.correction.type}`")


def general(refused: str, combination: Combination) -> str:
    """The message with the names of loss and correction left open."""
    opened = re.sub(rf"\b{combination.loss.type}\b", "LOSS", refused)
    return re.sub(rf"\b{combination.correction.type}\b", "CORRECTION", opened)


def page() -> str:
    verdicts: dict[Combination, str | None] = {}
    for combination in combinations():
        refused = combination.refusal()
        verdicts[combination] = None if refused is None else general(refused, combination)
    reasons = list(dict.fromkeys(refused for refused in verdicts.values() if refused is not None))
    lines = [
        "# What goes with what",
        "",
        "A combination of settings trains, or a run with it is refused before it starts, by a message that names what does not go",
        "together. Below each loss stands with each setting of the others: **yes** where both train together on either base of the",
        "ratio, *behaviour* or *proximal* where they do on that base alone (messages 1 and 2 say why), **no** with the number of the message",
        "where they never do.",
        "",
        f"{sum(refused is None for refused in verdicts.values())} of {len(verdicts)} combinations of loss, base, correction, kept sets, credit, cut and weights train. Each",
        "of these has made a step with a finite gradient that is not 0, the critic's with it, and, where no branch is measured whole, the",
        "same gradient with shared tokens stored once as with every branch apart:",
        "`test_every_combination_makes_a_step_or_is_refused_by_name`. Where branches are measured whole, what a shared token is in a later",
        "branch differs ([trees.md](trees.md#what-a-shared-token-counts)). This page is what `python -m tests.loop.trainer.pairs` prints.",
        "",
        *table(verdicts, reasons, [f"`{correction.type}`" for correction in CORRECTIONS]),
        "",
        *table(verdicts, reasons, [*(f"`ratio.base` {base}" for base in BASES), *WORDS]),
        "",
        *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)),
        "",
        "Score centring, the pull to a reference and the optimisers are in [losses.md](losses.md), with what they go with.",
    ]
    return "\n".join(lines) + "\n"


def table(verdicts: dict[Combination, str | None], reasons: list[str], columns: list[str]) -> list[str]:
    lines = ["| loss | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for loss in LOSSES:
        own = {combination: refused for combination, refused in verdicts.items() if combination.loss == loss}
        cells = [cell(own, reasons, column) for column in columns]
        lines.append(f"| {name_of(loss)} | " + " | ".join(cells) + " |")
    return lines


def cell(own: dict[Combination, str | None], reasons: list[str], column: str) -> str:
    here = {combination: refused for combination, refused in own.items() if column in columns_of(combination)}
    bases = [base for base in BASES if any(c.base == base and refused is None for c, refused in here.items())]
    if bases:
        return "yes" if len(bases) == len(BASES) or "ratio.base" in column else bases[0]
    elsewhere = {refused for combination, refused in own.items() if combination not in here}
    why = set(here.values()) - elsewhere or set(here.values())
    return "no: " + ", ".join(str(number) for number, reason in enumerate(reasons, 1) if reason in why)


if __name__ == "__main__":
    print(page(), end="")
