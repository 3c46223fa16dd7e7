"""Which branches of an episode train, and what becomes of every sampled token of it.

Branches are admitted whole, root to leaf: main before summary before sub-agent before a sub-agent's summary; within a
role one is drawn with a probability proportional to its tokens that no admitted branch owns yet (QwenGyre,
arXiv:2609.33848). A token on several admitted branches is trained once, with its episode's credit; to the later ones it
is context. So a shared turn counts once, not once per branch that follows it (arXiv:2511.00413 weighs it by them).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

import numpy as np
from pydantic import Field

from everlong.contracts.config import Config
from everlong.contracts.errors import Reason
from everlong.contracts.records import Episode, FinishReason, Record, ScoredGroup
from everlong.trajectories.staleness import OVER_AGE, mask_over_age
from everlong.trajectories.tree import ROLES, EpisodeTree

NOT_IN_TREE = "not_in_tree"
"""Sampled tokens that stand in no turn."""


class AdmissionConfig(Config):
    zero_signal: Literal["drop", "keep"] = "drop"
    """A group whose rewards are all equal has credit 0 everywhere. drop: its tokens leave the batch and the denominator.
    keep: they stay in both, which makes the step smaller, as in GRPO without filter."""
    max_branches: int = Field(5, ge=1)
    """Branches per episode that train; what lies only on others is discarded as not admitted."""
    overlong: Literal["train", "mask"] = "train"
    """mask: an episode cut off by a length limit trains nowhere, but its reward stays in the baseline (arXiv:2503.14476)."""


class TokenOutcome(Record, frozen=True, kw_only=True):
    """Where an episode's sampled tokens went; adds up to `Episode.num_sampled`."""

    trained: int
    discarded: dict[str, int]
    """By reason: "no_verdict", "too_few_verdicts", "zero_signal", "overlong_masked", "not_admitted", "over_age" (of a
    policy version that is too old), "masked" (the turn itself says that the token must not train), "not_in_tree" (sampled for a turn that nobody kept)."""


class Branch(Record, frozen=True, kw_only=True):
    """A root-to-leaf path that trains."""

    path: tuple[int, ...]
    """Indices of its turns, the root's child first."""
    role: str
    """Of its leaf."""
    num_trained: int
    """Tokens that no branch admitted before it owns."""


class Admission(Record, frozen=True, kw_only=True, eq=False):
    """What was decided about one episode."""

    episode: Episode
    credit: float | None
    branches: tuple[Branch, ...]
    """In the order of their admission; none where the episode does not train."""
    outcome: TokenOutcome


def admit_group(
    group: ScoredGroup, config: AdmissionConfig, seed: int, oldest_version: int | None = None
) -> list[Admission]:
    """Every episode of the group, by attempt; tokens of a version before `oldest_version` train nowhere. The draw depends on
    seed, group and attempt, and on no neighbour."""
    members = sorted(zip(group.episodes, group.credits, strict=True), key=lambda member: member[0].order.attempt)
    return [_admit(group, episode, credit, config, seed, oldest_version) for episode, credit in members]


def _admit(
    group: ScoredGroup,
    episode: Episode,
    credit: float | None,
    config: AdmissionConfig,
    seed: int,
    oldest_version: int | None,
) -> Admission:
    reason = _refusal(group, episode, config)
    episode, num_over_age = mask_over_age(episode, oldest_version)
    branches: tuple[Branch, ...] = ()
    if reason is None:
        rng = np.random.default_rng((seed, group.group, episode.order.attempt))
        branches = admit_branches(episode, config.max_branches, rng)
    outcome = _outcome(episode, branches, reason, num_over_age)
    return Admission(episode=episode, credit=credit, branches=branches, outcome=outcome)


def _refusal(group: ScoredGroup, episode: Episode, config: AdmissionConfig) -> str | None:
    """Why no token of the episode trains; None where some may."""
    if episode.reward is None:
        return "no_verdict"
    if group.discarded is not None and not (group.discarded == "zero_signal" and config.zero_signal == "keep"):
        return group.discarded
    if config.overlong == "mask" and is_overlong(episode):
        return "overlong_masked"
    return None


def is_overlong(episode: Episode) -> bool:
    """True where a length limit cut the episode off: the context was full, or its last main turn ran out of tokens."""
    last = next((turn for turn in reversed(episode.turns) if turn.role == "main"), None)
    return episode.reason == Reason.CONTEXT_FULL or (last is not None and last.finish_reason == FinishReason.LENGTH)


def admit_branches(episode: Episode, max_branches: int, rng: np.random.Generator) -> tuple[Branch, ...]:
    """At most `max_branches` root-to-leaf paths, each with at least one trainable token that is its own."""
    tree = EpisodeTree(episode.turns)
    parents = {turn.parent for turn in episode.turns}
    leaves = [turn for turn in episode.turns if turn.index not in parents]
    paths = {leaf.index: tree.path(leaf) for leaf in leaves}
    untrained = [turn.sampled.num_trainable for turn in episode.turns]
    admitted: list[Branch] = []
    while len(admitted) < max_branches:
        counts = {leaf.index: sum(untrained[turn] for turn in paths[leaf.index]) for leaf in leaves}
        waiting = [leaf for leaf in leaves if counts[leaf.index]]
        if not waiting:
            break
        role = min((leaf.role for leaf in waiting), key=ROLES.index)
        leaf = _draw({leaf.index: counts[leaf.index] for leaf in waiting if leaf.role == role}, rng)
        admitted.append(Branch(path=tuple(paths[leaf]), role=role, num_trained=counts[leaf]))
        for turn in paths[leaf]:
            untrained[turn] = 0
    return tuple(admitted)


def continuations(admitted: Admission) -> tuple[int, ...]:
    """For each branch the one that goes on with its work: whose first turn of its own continues the branch's last. -1 where
    none does, or it was not admitted; the earliest of several."""
    owners: dict[int, int] = {}
    for number, branch in enumerate(admitted.branches):
        for turn in branch.path:
            owners.setdefault(turn, number)
    firsts = [min(turn for turn in branch.path if owners[turn] == n) for n, branch in enumerate(admitted.branches)]
    leaves = {branch.path[-1]: number for number, branch in enumerate(admitted.branches)}
    found = [-1] * len(firsts)
    for number in sorted(range(len(firsts)), key=firsts.__getitem__):
        ended = leaves.get(admitted.episode.turns[firsts[number]].continues, -1)
        if ended >= 0 and found[ended] < 0:
            found[ended] = number
    return tuple(found)


def _draw(counts: dict[int, int], rng: np.random.Generator) -> int:
    """A key, with a probability proportional to its count."""
    ends = np.cumsum(list(counts.values()))
    return list(counts)[int(np.searchsorted(ends, rng.integers(int(ends[-1])), side="right"))]


def _outcome(episode: Episode, branches: Iterable[Branch], reason: str | None, num_over_age: int) -> TokenOutcome:
    on_path = {turn for branch in branches for turn in branch.path}
    trained, discarded = 0, Counter({NOT_IN_TREE: episode.num_discarded})
    if reason is None:
        discarded.update({OVER_AGE: num_over_age, "masked": -num_over_age})
    for turn in episode.turns:
        trainable = turn.sampled.num_trainable
        if reason is not None:
            discarded[reason] += turn.sampled.num_sampled
            continue
        discarded["masked"] += turn.sampled.num_sampled - trainable
        if turn.index in on_path:
            trained += trainable
        else:
            discarded["not_admitted"] += trainable
    return TokenOutcome(trained=trained, discarded={name: n for name, n in discarded.items() if n})
