"""From a packed batch and the values of its tokens to credit and value targets per token.

However the batch is cut: a branch's tokens are gathered over all micro-batches, in the order of its path. A token on several
branches belongs to the one that trains it, and what follows it is what follows on that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from everlong.contracts.records import EpisodeShare, MicroBatch, ScoredColumns, TrainBatch
from everlong.trajectories.credit.gae import GaeConfig, advantages

# T tokens of the batch, over all micro-batches; N of them in one branch


@dataclass(frozen=True, slots=True)
class _Values:
    before_T: np.ndarray
    after_T: np.ndarray


@dataclass(frozen=True, slots=True)
class _Targets:
    """float64[T], NaN where nothing is trained."""

    credit_T: np.ndarray
    returns_T: np.ndarray


def credit_from_values(batch: TrainBatch, scores: ScoredColumns, config: GaeConfig) -> TrainBatch:
    """The batch with credit and value targets. What its tokens have as credit before is added: it is what their turn costs,
    which no target holds.

    Raises ValueError where a trained token has no value or its episode no reward.
    """
    if scores.values is None or scores.values_after is None:
        raise ValueError("credit of type gae needs values, and the scores hold none: the trainer has no critic")
    values = _Values(_joined(scores.values), _joined(scores.values_after))
    nothing = np.full(len(values.before_T), np.nan)
    targets = _Targets(nothing, nothing.copy())
    for episode, branches in _branches(batch.micro_batches).items():
        share = batch.episodes[episode]
        for chain in _chains(share, branches):
            _credit_chain(share, chain, values, targets, config)
    return _with_targets(batch, targets)


def _joined(columns: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *columns]).astype(np.float64)


def _branches(micro_batches: Sequence[MicroBatch]) -> dict[int, dict[int, np.ndarray]]:
    """By episode, the trained tokens of each of its branches, as places in the batch, in the order of the path."""
    owners, trained, positions = [], [], []
    for micro_batch in micro_batches:
        owner = np.full((len(micro_batch.columns), 2), -1)
        for segment in micro_batch.segments:
            owner[segment.start : segment.start + segment.length] = segment.episode, segment.branch
        columns = micro_batch.columns
        owners.append(owner)
        trained.append(columns.trainable & columns.sampled & np.isfinite(columns.credit))
        positions.append(micro_batch.positions())
    if not owners:
        return {}
    owner_T, position_T = np.concatenate(owners), np.concatenate(positions)
    tokens = np.flatnonzero(np.concatenate(trained))
    tokens = tokens[np.lexsort((position_T[tokens], owner_T[tokens, 1], owner_T[tokens, 0]))]
    keys, starts = np.unique(owner_T[tokens], axis=0, return_index=True)
    found: dict[int, dict[int, np.ndarray]] = {}
    for (episode, branch), part in zip(keys.tolist(), np.split(tokens, starts[1:]), strict=False):
        found.setdefault(episode, {})[branch] = part
    return found


def _chains(share: EpisodeShare, branches: dict[int, np.ndarray]) -> Iterator[list[np.ndarray]]:
    """The episode's branches, each with those that go on with its work."""
    follows = {branch: share.continued_by[branch] for branch in branches if branch < len(share.continued_by)}
    for first in sorted(branches.keys() - set(follows.values())):
        chain, branch = [], first
        while branch in branches:
            chain.append(branches[branch])
            branch = follows.get(branch, -1)
        yield chain


def _credit_chain(
    share: EpisodeShare, chain: list[np.ndarray], values: _Values, targets: _Targets, config: GaeConfig
) -> None:
    end = _end(share, float(values.after_T[chain[-1][-1]]), config)
    parts = [np.concatenate(chain)] if config.boundary == "bootstrap" else chain
    num_behind = sum(map(len, parts))
    for tokens in parts:
        num_behind -= len(tokens)
        values_N, decay = values.before_T[tokens], config.decay.of(len(tokens))
        if not np.isfinite(values_N).all():
            raise ValueError(
                f"a trained token of episode {share.episode} has no value: score the batch that is trained"
            )
        credit_N = advantages(values_N, end, config.discount, decay)
        targets.credit_T[tokens] = credit_N * (config.discount * decay) ** num_behind
        targets.returns_T[tokens] = values_N + advantages(values_N, end, config.discount, config.value_decay)


def _end(share: EpisodeShare, value_after: float, config: GaeConfig) -> float:
    """What falls due at the last token of a chain (Step 3.5 Flash, arXiv:2602.10604, for the bootstrap)."""
    if share.truncated and config.truncated == "bootstrap":
        if not np.isfinite(value_after):
            raise ValueError(f"the last state of episode {share.episode} has no value: score the batch that is trained")
        return config.discount * value_after
    if share.reward is None:
        raise ValueError(f"episode {share.episode} trains without a reward: what has no verdict trains nowhere")
    return share.reward


def _with_targets(batch: TrainBatch, targets: _Targets) -> TrainBatch:
    micro_batches, start = [], 0
    for micro_batch in batch.micro_batches:
        columns, stop = micro_batch.columns, start + len(micro_batch.columns)
        credit, returns = targets.credit_T[start:stop], targets.returns_T[start:stop]
        columns = columns.replace(
            credit=np.where(np.isfinite(credit), columns.credit + credit, columns.credit).astype(np.float32),
            returns=returns.astype(np.float32),
        )
        micro_batches.append(msgspec.structs.replace(micro_batch, columns=columns))
        start = stop
    return msgspec.structs.replace(batch, micro_batches=tuple(micro_batches))
