"""Seconds of one reinforcement-learning step against TRL's GRPO trainer: SmolLM2-135M, bfloat16, same threads.

A step is what it takes from one policy version to the next: sample a group of 8 answers of 64 tokens to a prompt of 128,
score them, one gradient and one update. Ours also publishes the version and loads it into the engine, which TRL, whose
trainer samples with the weights it trains, need not. Rewards are made up, and every answer has its full length on both sides.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass

from everlong.cli.bench import Row
from everlong.cli.benches.engine import NEW_TOKENS, requests
from everlong.cli.benches.peers.process import Peer
from everlong.cli.benches.prompts import Windows
from everlong.cli.benches.smollm2 import SmolCell, open_smollm2
from everlong.cli.benches.timing import Spent, Stopwatch
from everlong.contracts.records import (
    Episode,
    EpisodeOrder,
    GenerateReply,
    GenerateRequest,
    Purpose,
    Reason,
    Turn,
    Verdict,
)
from everlong.contracts.tokens import TokenColumns
from everlong.engines.config import EmbeddedConfig
from everlong.trajectories.admission import AdmissionConfig
from everlong.trajectories.credit.group_mean import GroupMeanConfig
from everlong.trajectories.credit.scoring import score_group
from everlong.trajectories.packing import PackingConfig, pack_batch

GROUP_SIZE, PROMPT_TOKENS, TURNS = 8, 128, 3


def measure() -> list[Row]:
    return asyncio.run(_measure())


async def _measure() -> list[Row]:
    cell = await open_smollm2(EmbeddedConfig())
    windows = Windows(cell.tokenizer)
    prompts = [windows.take(PROMPT_TOKENS) for _ in range(1 + TURNS)]
    job = {
        "model": str(cell.folder),
        "prompts": [cell.tokenizer.decode(prompt) for prompt in prompts],
        "new_tokens": NEW_TOKENS,
        "group_size": GROUP_SIZE,
    }
    peer = Peer("grpo", job, cell.threads)
    ours: list[Spent] = []
    theirs: list[Spent] = []
    try:
        for batch, prompt in enumerate(prompts):
            ours.append((await rl_step(cell, batch, prompt)).whole)
            answer = peer.ask({})
            assert answer["tokens"] == GROUP_SIZE * NEW_TOKENS, f"TRL sampled another number of tokens: {answer}"
            theirs.append(Spent(answer["seconds"], answer["cpu_seconds"]))
    finally:
        peer.close()
        await cell.close()
    # the first turn warms both up
    ours, theirs = ours[1:], theirs[1:]
    return [
        _row("step_s", *(statistics.median(spent.seconds for spent in side) for side in (ours, theirs))),
        _row("step_cpu_s", *(statistics.median(spent.cpu_seconds for spent in side) for side in (ours, theirs))),
    ]


def _row(metric: str, value: float, reference: float) -> Row:
    case = f"{GROUP_SIZE} x ({PROMPT_TOKENS} + {NEW_TOKENS})"
    return Row(case, metric, "s", value, "trl", reference, reference / value)


@dataclass(frozen=True, slots=True)
class StepCost:
    whole: Spent
    training: Spent
    """Gradient and update."""
    sync: Spent
    """Publishing the version and loading it into the engine."""
    size_bytes: int
    """Of the version."""


async def rl_step(cell: SmolCell, batch: int, prompt: list[int]) -> StepCost:
    """Sample a group of answers to the prompt, train on them, publish, load."""
    whole = Stopwatch()
    asked = requests([prompt] * GROUP_SIZE)
    replies = await asyncio.gather(*(cell.engine.generate(request) for request in asked))
    episodes = [_episode(batch, attempt, *pair) for attempt, pair in enumerate(zip(asked, replies, strict=True))]
    group = score_group(batch, "bench", episodes, GroupMeanConfig())
    packed = pack_batch(batch, [group], PackingConfig(), AdmissionConfig(), seed=0)
    training = Stopwatch()
    report = await cell.trainer.train(packed.train_batch)
    trained, sync = training.read(), Stopwatch()
    published = await cell.trainer.publish()
    await cell.engine.update(published.version)
    assert report.metrics["tokens/trained"] == GROUP_SIZE * NEW_TOKENS
    return StepCost(whole.read(), trained, sync.read(), published.size_bytes)


def _episode(batch: int, attempt: int, request: GenerateRequest, reply: GenerateReply) -> Episode:
    order = EpisodeOrder(purpose=Purpose.TRAIN, group=batch, attempt=attempt, task="bench", min_policy_version=batch)
    turn = Turn(
        index=0,
        parent=-1,
        context=TokenColumns.context(request.prompt_ids),
        sampled=reply.columns,
        finish_reason=reply.finish_reason,
    )
    return Episode(order=order, reason=Reason.DONE, verdict=Verdict(reward=float(attempt % 2)), turns=(turn,))
