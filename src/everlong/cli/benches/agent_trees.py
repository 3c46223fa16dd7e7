"""Shapes of trees that agents leave, drawn once and kept in `agent_trees.json`: `python -m everlong.cli.benches.agent_trees`.

Three groups, named after their overlap (POR, arXiv:2511.00413: the share of the tokens of all branches that a tree need not
repeat). Lengths are drawn around these, from one seed:

tree-0.5    four attempts at one task with a prompt of 300 tokens, 8 turns of about 60 each, one of them taken back half-way and
            done again to its end.
tree-0.8    two attempts at a task of 200, 12 turns each; at every turn the thinking, about 30, is dropped from the history, so
            that the next prompt forks off before it.
tree-0.95   one attempt at a task of 500, 40 short turns whose thinking is dropped.

A turn is (parent, repeats, context, sampled): the turn that its prompt goes on from, or -1; how many tokens its context has from the
beginning of the turn before it, which is how a rewritten history stands in a record; the length of its context, and of its answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from everlong.contracts.records import Episode, EpisodeOrder, FinishReason, Purpose, Reason, ScoredGroup, Turn, Verdict
from everlong.contracts.tokens import TokenColumns

FILE = Path(__file__).with_name("agent_trees.json")
SEED = 0
Shape = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class GroupShape:
    prompt: int
    """Tokens with which every episode begins."""
    episodes: tuple[tuple[Shape, ...], ...]


def read_shapes() -> dict[str, GroupShape]:
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: GroupShape(shape["prompt"], tuple(tuple(tuple(t) for t in turns) for turns in shape["episodes"]))
        for name, shape in found.items()
    }


def draw_shapes(seed: int = SEED) -> dict[str, GroupShape]:
    """The same seed gives the same shapes."""
    rng = np.random.default_rng(seed)
    return {
        "tree-0.5": GroupShape(300, tuple(_retried(rng, prompt=300, turns=8) for _ in range(4))),
        "tree-0.8": GroupShape(200, tuple(_dropped(rng, 200, turns=12, step=40, thinking=30) for _ in range(2))),
        "tree-0.95": GroupShape(500, (_dropped(rng, 500, turns=40, step=20, thinking=12),)),
    }


def _about(rng: np.random.Generator, length: int) -> int:
    """Within a half of it, either way."""
    return int(rng.integers(length - length // 2, length + length // 2 + 1))


def _retried(rng: np.random.Generator, prompt: int, turns: int) -> tuple[Shape, ...]:
    chain: list[Shape] = [(-1, 0, prompt + _about(rng, 20), _about(rng, 40))]
    chain += [(index, 0, _about(rng, 20), _about(rng, 40)) for index in range(turns - 1)]
    back = turns // 2
    again = [(back - 1 if n == 0 else turns + n - 1, 0, _about(rng, 20), _about(rng, 40)) for n in range(turns - back)]
    return (*chain, *again)


def _dropped(rng: np.random.Generator, prompt: int, turns: int, step: int, thinking: int) -> tuple[Shape, ...]:
    lengths = np.cumsum([prompt, *(_about(rng, step) for _ in range(turns - 1))]).tolist()
    repeats = [0, *lengths[:-1]]
    return tuple((-1, r, length, _about(rng, thinking)) for r, length in zip(repeats, lengths, strict=True))


def group_of(number: int, shape: GroupShape, vocab_size: int, seed: int = SEED) -> ScoredGroup:
    """A group of that shape over random ids, half of its attempts with a positive credit."""
    rng = np.random.default_rng((seed, number))
    prompt = rng.integers(0, vocab_size, shape.prompt)
    episodes = []
    for attempt, turns in enumerate(shape.episodes):
        order = EpisodeOrder(task="bench", group=number, attempt=attempt, purpose=Purpose.TRAIN)
        verdict = Verdict(reward=float(attempt % 2))
        made = _turns(turns, prompt, vocab_size, rng)
        episodes.append(Episode(order=order, reason=Reason.DONE, verdict=verdict, turns=made))
    credits = tuple(1.0 - 2.0 * (attempt % 2) for attempt in range(len(episodes)))
    return ScoredGroup(group=number, task="bench", episodes=tuple(episodes), credits=credits)


def _turns(
    shapes: tuple[Shape, ...], prompt: np.ndarray, vocab_size: int, rng: np.random.Generator
) -> tuple[Turn, ...]:
    turns, before = [], prompt
    for index, (parent, repeats, context, sampled) in enumerate(shapes):
        known = before[:repeats] if repeats else prompt[: len(prompt) if parent < 0 else 0]
        before = np.concatenate([known, rng.integers(0, vocab_size, context - len(known))])
        answer = TokenColumns.sampled_tokens(rng.integers(0, vocab_size, sampled), -5 * rng.random(sampled), version=0)
        turns.append(
            Turn(
                index=index,
                parent=parent,
                context=TokenColumns.context(before),
                sampled=answer,
                finish_reason=FinishReason.STOP,
            )
        )
    return tuple(turns)


if __name__ == "__main__":
    shapes = {name: {"prompt": s.prompt, "episodes": s.episodes} for name, s in draw_shapes().items()}
    FILE.write_text(json.dumps(shapes) + "\n", encoding="utf-8")
