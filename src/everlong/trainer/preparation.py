"""From a batch's records to what one gradient needs of them: checked, counted and weighed before anything is computed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from everlong.contracts.records import EpisodeShare, MicroBatch, TrainBatch
from everlong.models.decisions import Replay
from everlong.models.llama.config import LlamaConfig
from everlong.trainer.branches import Branches
from everlong.trainer.decided import replayed_rows
from everlong.trainer.denominators import TokenOwners, weigh
from everlong.trainer.objective import Objective
from everlong.trainer.occurrences import Occurrences, each_once, on_every_branch
from everlong.trainer.replay import (
    Rows,
    branch_of_token,
    check_micro_batch,
    episode_of_token,
    rows_of,
    trained_tokens,
)

# R trained rows of a micro-batch, P of them the policy sampled
# what counts on a branch: F sampled ones, O of them train there; S supervised ones


@dataclass(frozen=True, slots=True)
class OnBranches:
    """What the policy sampled, as the branches hold it."""

    policy_F: Tensor
    """Which of the P rows it is."""
    branches: Branches
    """Of the F."""
    own_O: Tensor | None
    """Which of the F train, where the others are constants; None: all."""
    weights_O: Tensor
    """Of the reduction."""


@dataclass(frozen=True, slots=True)
class PreparedMicroBatch:
    micro_batch: MicroBatch
    rows: Rows
    policy_P: Tensor
    """Which rows the policy sampled; the others are imitated."""
    supervised_S: Tensor
    """Rows to imitate, on every branch on which they count."""
    weights_S: Tensor
    """Of the reduction."""
    on_branches: OnBranches
    behaviour_P: Tensor
    """Logprobs at sampling."""
    credit_P: Tensor
    returns_P: Tensor
    """What a critic's values are pulled to; NaN where none learns."""
    branches: Branches
    """Of the rows that the policy sampled, each on the branch that first holds it."""
    replayed: Mapping[str, Tensor] = field(default_factory=dict)
    """Decisions of the network that its passes take from elsewhere, by name; none where it makes its own."""

    def replay(self) -> Replay | None:
        """For the tokens to pass once."""
        return Replay(self.replayed) if self.replayed else None


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    micro_batches: tuple[PreparedMicroBatch, ...]
    denominator: int
    num_trained: int

    @property
    def num_policy(self) -> int:
        """Trained tokens that the policy sampled."""
        return sum(len(micro_batch.policy_P) for micro_batch in self.micro_batches)

    @property
    def returns(self) -> Tensor:
        """Of all of them, micro-batch after micro-batch."""
        return torch.cat([torch.zeros(0), *(micro_batch.returns_P for micro_batch in self.micro_batches)])

    @property
    def credit(self) -> Tensor:
        """The same tokens' credit."""
        return torch.cat([torch.zeros(0), *(micro_batch.credit_P for micro_batch in self.micro_batches)])

    @property
    def branches(self) -> Branches:
        """Of all rows that the policy sampled, micro-batch after micro-batch."""
        return Branches.join([micro_batch.branches for micro_batch in self.micro_batches])


def prepare_batch(
    batch: TrainBatch, objective: Objective, model: LlamaConfig, recorded: Collection[str] = ()
) -> PreparedBatch:
    """`recorded` decisions are replayed as the record has them. Raises ValueError for a batch whose records or counts do not hold
    together, before anything is computed."""
    pieces = [_rows(index, micro_batch, model) for index, micro_batch in enumerate(batch.micro_batches)]
    trained = _join([owners for _, owners in pieces])
    _check_counts(batch, np.bincount(trained.episode_T, minlength=len(batch.episodes)))
    loss = objective.loss
    pairs = list(zip(batch.micro_batches, pieces, strict=True))
    counted = [_occurrences(micro_batch, *piece, objective) for micro_batch, piece in pairs]
    owners = _join([occurrences.training for occurrences in counted])
    weights, denominator = weigh(owners, batch.episodes, loss.reduction, loss.constant_length)
    ends = np.cumsum([occurrences.trains_F.sum() for occurrences in counted], dtype=np.int64)
    parts = np.split(weights, ends)[:-1]  # what lies behind the last end is empty
    prepared = tuple(
        _prepare(micro_batch, *piece, occurrences, part, replayed_rows(index, micro_batch, model, recorded))
        for index, ((micro_batch, piece), occurrences, part) in enumerate(zip(pairs, counted, parts, strict=True))
    )
    if objective.ratio.score_centring:
        _check_kept_logprobs(prepared)
    if objective.of_branches:
        _check_branches(batch.episodes, [own for _, own in pieces])
    if objective.level == "sequence":
        _check_credit(prepared)
    return PreparedBatch(prepared, denominator, len(trained.episode_T))


def _rows(index: int, micro_batch: MicroBatch, model: LlamaConfig) -> tuple[Rows, TokenOwners]:
    check_micro_batch(index, micro_batch, model)
    segments, num_tokens = micro_batch.segments, len(micro_batch.columns)
    owners = episode_of_token(segments, num_tokens)
    trained = trained_tokens(micro_batch.columns)
    rows = rows_of(micro_batch, trained)
    if len(rows) != trained.sum() or np.any(owners[rows.tokens] < 0):
        raise ValueError(
            f"micro-batch {index} trains the first token of a root, which nothing predicts, or a token of a shared "
            "prompt, which trains nowhere: give every episode a context before its first trainable token"
        )
    return rows, TokenOwners(owners[rows.tokens], branch_of_token(segments, num_tokens)[rows.tokens])


def _occurrences(micro_batch: MicroBatch, rows: Rows, owners: TokenOwners, objective: Objective) -> Occurrences:
    if objective.shared_prefix == "sum_over_leaves":
        return on_every_branch(micro_batch, rows, owners, trains=True)
    if objective.of_branches:
        return on_every_branch(micro_batch, rows, owners, trains=False)
    return each_once(rows, owners)


def _prepare(
    micro_batch: MicroBatch,
    rows: Rows,
    owners: TokenOwners,
    occurrences: Occurrences,
    weights: np.ndarray,
    replayed: Mapping[str, Tensor],
) -> PreparedMicroBatch:
    columns, tokens = micro_batch.columns, rows.tokens
    sampled = columns.sampled[tokens]
    sampled_F = sampled[occurrences.rows_F]
    weights_F = np.zeros(len(sampled_F), np.float32)
    weights_F[occurrences.trains_F] = weights
    supervised_F = ~sampled_F & occurrences.trains_F
    return PreparedMicroBatch(
        micro_batch=micro_batch,
        rows=rows,
        policy_P=torch.from_numpy(np.flatnonzero(sampled)),
        supervised_S=torch.from_numpy(occurrences.rows_F[supervised_F]),
        weights_S=torch.from_numpy(weights_F[supervised_F]),
        on_branches=_on_branches(sampled, sampled_F, occurrences, weights_F),
        behaviour_P=torch.from_numpy(columns.logprobs[tokens][sampled]),
        credit_P=torch.from_numpy(columns.credit[tokens][sampled]),
        returns_P=torch.from_numpy(columns.returns[tokens][sampled]),
        branches=_branches(owners, sampled),
        replayed=replayed,
    )


def _on_branches(
    sampled_R: np.ndarray, sampled_F: np.ndarray, occurrences: Occurrences, weights_F: np.ndarray
) -> OnBranches:
    place_R = np.cumsum(sampled_R) - 1
    trains_F = occurrences.trains_F[sampled_F]
    return OnBranches(
        policy_F=torch.from_numpy(place_R[occurrences.rows_F[sampled_F]]),
        branches=_branches(occurrences.owners, sampled_F),
        own_O=None if trains_F.all() else torch.from_numpy(np.flatnonzero(trains_F)),
        weights_O=torch.from_numpy(weights_F[sampled_F][trains_F]),
    )


def _branches(owners: TokenOwners, wanted: np.ndarray) -> Branches:
    keys = np.stack([owners.episode_T, owners.branch_T], 1)[wanted]
    branches, index = np.unique(keys, axis=0, return_inverse=True)
    return Branches(torch.from_numpy(index.reshape(-1)), len(branches))


def _join(owners: Sequence[TokenOwners]) -> TokenOwners:
    nothing = np.zeros(0, np.int64)
    return TokenOwners(
        np.concatenate([nothing, *(own.episode_T for own in owners)]),
        np.concatenate([nothing, *(own.branch_T for own in owners)]),
    )


def _check_counts(batch: TrainBatch, counts: np.ndarray) -> None:
    for share, count in zip(batch.episodes, counts, strict=True):
        if share.num_trainable != count:
            raise ValueError(
                f"episode {share.episode} of batch {batch.batch} says {share.num_trainable} trainable tokens, its columns "
                f"hold {count} with mask and credit: the denominator would be wrong, count again when packing"
            )


def _check_branches(episodes: Sequence[EpisodeShare], owners: Sequence[TokenOwners]) -> None:
    seen: dict[tuple[int, int], int] = {}
    for index, own in enumerate(owners):
        for key in _keys(own):
            if seen.setdefault(key, index) != index:
                raise ValueError(
                    f"branch {key[1]} of episode {episodes[key[0]].episode} trains in micro-batches {seen[key]} and {index}: its "
                    "ratio is of all its tokens, so pack a branch whole or number its parts as branches"
                )


def _check_kept_logprobs(micro_batches: Sequence[PreparedMicroBatch]) -> None:
    for index, prepared in enumerate(micro_batches):
        rows = prepared.rows
        if rows.kept is None:
            continue
        if rows.kept_logprobs_K is None or not rows.kept_logprobs_K.isfinite().all():
            raise ValueError(
                f"micro-batch {index} has kept sets without the sampler's logprobs, which ratio.score_centring needs: they are "
                "recorded at sampling, and never filled in later"
            )


def _keys(owners: TokenOwners) -> Iterator[tuple[int, int]]:
    yield from sorted(set(zip(owners.episode_T.tolist(), owners.branch_T.tolist(), strict=True)))


def _check_credit(micro_batches: Sequence[PreparedMicroBatch]) -> None:
    for index, prepared in enumerate(micro_batches):
        branches, credit_F = prepared.on_branches.branches, prepared.credit_P[prepared.on_branches.policy_F]
        if not torch.equal(branches.spread(branches.means(credit_F), credit_F), credit_F):
            raise ValueError(
                f"credit differs within a branch of micro-batch {index}, and the ratio of a whole branch has one credit: take "
                "loss gspo_token, or loss.level=sequence_token"
            )
