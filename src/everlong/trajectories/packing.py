"""From scored groups to the micro-batches of one optimiser step, with what groups and branches share kept as trees.

A group's tree is packed whole where it fits. Where it does not, the cheaper of two is done: the tree passes in parts, at the price of
another forward pass, or its episodes are packed each for itself, with the shared prompt again. An episode is never split, so that
every sampled token stands in one micro-batch with all that comes behind it; one that is larger than the limit passes in parts. The
result depends on the groups and the seed, not on the order they come in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from pydantic import Field

from everlong.contracts.config import Config
from everlong.contracts.records import EpisodeShare, MicroBatch, ScoredGroup, Segment, TrainBatch
from everlong.contracts.tokens import TokenColumns
from everlong.trajectories.admission import (
    Admission,
    AdmissionConfig,
    TokenOutcome,
    admit_group,
    continuations,
    is_overlong,
)
from everlong.trajectories.group_tree import GroupTree
from everlong.trajectories.staleness import staleness_stats

NO_GROUP = -1
"""Group of a supervised trace."""
PARTS_COST = 4 / 3
"""Of a pass in parts, against one at once: two forward passes and a backward one, which takes twice as long as a forward one."""


class PackingConfig(Config):
    micro_batch_tokens: int = Field(4096, ge=1)
    """Tokens of one forward and backward pass; more need more memory. What is larger passes in parts, with the same gradients."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    train_batch: TrainBatch
    outcomes: dict[str, TokenOutcome]
    """By episode id, one for every episode of every group."""
    stats: dict[str, float]


def pack_batch(
    batch: int,
    groups: Sequence[ScoredGroup],
    config: PackingConfig,
    admission: AdmissionConfig,
    seed: int,
    max_staleness: int | None = None,
) -> PackedBatch:
    """Admit and pack. A batch in which nothing may train has no micro-batch. Batch b trains on policy version b: tokens that are
    more than `max_staleness` versions older train nowhere. Raises ValueError where a group is there twice."""
    groups = sorted(groups, key=lambda group: group.group)
    if len({group.group for group in groups}) != len(groups):
        raise ValueError(f"expected each group once, got {[group.group for group in groups]}")
    packer = _Packer(config.micro_batch_tokens)
    oldest_version = None if max_staleness is None else batch - max_staleness
    shares: list[EpisodeShare] = []
    outcomes: dict[str, TokenOutcome] = {}
    num_flat = 0
    for group in groups:
        admissions = admit_group(group, admission, seed, oldest_version)
        outcomes.update((admitted.episode.id, admitted.outcome) for admitted in admissions)
        training = [admitted for admitted in admissions if admitted.branches]
        tree = GroupTree()
        packer.add(tree, [_grow(tree, group, admitted, len(shares) + i) for i, admitted in enumerate(training)])
        shares += [_share(group, admitted) for admitted in training]
        num_flat += sum(_flat_length(admitted) for admitted in training)
    train_batch = TrainBatch(batch=batch, micro_batches=packer.micro_batches(), episodes=tuple(shares))
    stats = _stats(train_batch, outcomes.values(), num_flat, config.micro_batch_tokens)
    stats |= staleness_stats((micro_batch.columns for micro_batch in train_batch.micro_batches), batch)
    return PackedBatch(train_batch=train_batch, outcomes=outcomes, stats=stats)


def pack_supervised(batch: int, traces: Sequence[tuple[str, TokenColumns]], config: PackingConfig) -> TrainBatch:
    """Pack traces to imitate: one name and one T-token sequence each, trainable where the model shall say it.

    A prompt with which several traces begin is stored once per micro-batch. Raises ValueError for a name that comes twice,
    a trace with nothing to train or with sampled tokens, and one whose first token is trainable: nothing predicts it.
    """
    if len({name for name, _ in traces}) != len(traces):
        raise ValueError(f"expected each trace once, got {sorted(name for name, _ in traces)}")
    tree, packer = GroupTree(), _Packer(config.micro_batch_tokens)
    branches: list[list[int]] = []
    for index, (name, columns) in enumerate(traces):
        _check_trace(name, columns)
        prompt = int(columns.trainable.argmax())
        branches.append([tree.add(-1, columns.slice(0, prompt), columns.slice(prompt, len(columns)), index)])
    packer.add(tree, branches)
    shares = (EpisodeShare(episode=name, group=NO_GROUP, num_trainable=c.num_trainable) for name, c in traces)
    return TrainBatch(batch=batch, micro_batches=packer.micro_batches(), episodes=tuple(shares))


def _check_trace(name: str, columns: TokenColumns) -> None:
    if not columns.num_trainable or columns.trainable[0]:
        raise ValueError(
            f"trace {name!r} needs a prompt and then at least one trainable token, it has {len(columns)} tokens"
        )
    if columns.num_sampled:
        raise ValueError(
            f"trace {name!r} has {columns.num_sampled} sampled tokens: what a policy sampled is packed as a group"
        )


def _grow(tree: GroupTree, group: ScoredGroup, admitted: Admission, episode: int) -> list[int]:
    """Hang the admitted turns into the tree; returns the node at which each branch ends."""
    assert admitted.credit is not None, "what has no verdict has no branch that trains"
    ends = {-1: -1}
    for number, branch in enumerate(admitted.branches):
        for index in branch.path:
            if index not in ends:
                turn = admitted.episode.turns[index]
                sampled = turn.sampled.with_credit(admitted.credit - group.malformed_call * turn.malformed)
                ends[index] = tree.add(ends[turn.parent], turn.context, sampled, episode, number)
    return [ends[branch.path[-1]] for branch in admitted.branches]


def _share(group: ScoredGroup, admitted: Admission) -> EpisodeShare:
    rewards = dict(zip((episode.id for episode in group.episodes), group.rewards, strict=False))
    return EpisodeShare(
        episode=admitted.episode.id,
        group=group.group,
        num_trainable=admitted.outcome.trained,
        reward=rewards.get(admitted.episode.id),
        truncated=is_overlong(admitted.episode),
        continued_by=continuations(admitted),
    )


def _flat_length(admitted: Admission) -> int:
    """Tokens if every branch were a row of its own."""
    turns = (admitted.episode.turns[index] for branch in admitted.branches for index in branch.path)
    return sum(len(turn.context) + len(turn.sampled) for turn in turns)


def _stats(batch: TrainBatch, outcomes: Iterable[TokenOutcome], num_flat: int, limit: int) -> dict[str, float]:
    num_packed = sum(len(micro_batch.columns) for micro_batch in batch.micro_batches)
    discarded: Counter[str] = Counter()
    for outcome in outcomes:
        discarded.update(outcome.discarded)
    values = {
        "tokens/trained": float(batch.num_trainable),
        "tokens/packed": float(num_packed),
        "tokens/saved": float(num_flat - num_packed),
        "episodes/truncated": float(sum(share.truncated for share in batch.episodes)),
        "packing/micro_batches": float(len(batch.micro_batches)),
        **{f"tokens/discarded/{reason}": float(count) for reason, count in sorted(discarded.items())},
    }
    if num_packed:
        # Of the flat tokens, the share that sharing saves: POR in arXiv:2511.00413, negative where splits repeat more.
        values["packing/overlap_ratio"] = 1 - num_packed / num_flat
        # Above 1 where trees pass in parts.
        values["packing/fill"] = num_packed / (limit * len(batch.micro_batches))
        # What is recorded of a token beside the streams that every token has.
        columns = [micro_batch.columns for micro_batch in batch.micro_batches]
        values["record/kept_bytes_per_token"] = sum(part.kept.size_bytes for part in columns) / num_packed
        values["record/decision_bytes_per_token"] = sum(part.decisions.size_bytes for part in columns) / num_packed
    return values


@dataclass(slots=True)
class _Bin:
    """A micro-batch while it fills."""

    size: int = 0
    nodes: dict[int, set[int]] = field(default_factory=dict)
    """Node numbers, by tree."""


@dataclass(slots=True)
class _Run:
    """A segment while it grows."""

    parent: int
    episode: int
    parts: list[TokenColumns]
    branch: int | None = None
    """Of what was sampled; None where nothing was."""


class _Packer:
    """Puts each piece where it adds the fewest tokens, the earliest of equals; opens a micro-batch where none has room."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._trees: list[GroupTree] = []
        self._bins: list[_Bin] = []

    def add(self, tree: GroupTree, ends_by_episode: Sequence[Sequence[int]]) -> None:
        """Take the paths that end in these nodes. The tree must be complete."""
        self._trees.append(tree)
        episodes: list[set[int]] = [set().union(*(tree.path(end) for end in ends)) for ends in ends_by_episode]
        for piece in self._pieces([episode for episode in episodes if episode]):
            self._place(piece)

    def micro_batches(self) -> tuple[MicroBatch, ...]:
        return tuple(self._close(bin) for bin in self._bins)

    def _pieces(self, episodes: list[set[int]]) -> list[set[int]]:
        """The newest tree whole where it fits, or costs less in parts than its episodes would each for itself."""
        whole = [set().union(*episodes)] if episodes else []
        return whole if self._cost(whole) <= self._cost(episodes) else episodes

    def _cost(self, pieces: Sequence[set[int]]) -> float:
        """Tokens that must pass, as one pass at once counts them, were the pieces packed one after another."""
        total, nodes = 0.0, set()
        for piece in pieces:
            if nodes and self._size(nodes | piece) > self._limit:
                total, nodes = total + self._cost_of(nodes), set()
            nodes = nodes | piece
        return total + self._cost_of(nodes)

    def _cost_of(self, nodes: set[int]) -> float:
        size = self._size(nodes)
        return size * PARTS_COST if size > self._limit else size

    def _size(self, nodes: set[int]) -> int:
        return sum(len(self._trees[-1].nodes[node].columns) for node in nodes)

    def _place(self, piece: set[int]) -> None:
        tree, size = len(self._trees) - 1, self._size(piece)
        costs = [
            (self._size(piece - bin.nodes[tree]) if tree in bin.nodes else size, index)
            for index, bin in enumerate(self._bins)
        ]
        fitting = [(cost, index) for cost, index in costs if self._bins[index].size + cost <= self._limit]
        cost, index = min(fitting, default=(size, len(self._bins)))
        if index == len(self._bins):
            self._bins.append(_Bin())
        self._bins[index].size += cost
        self._bins[index].nodes.setdefault(tree, set()).update(piece)

    def _close(self, bin: _Bin) -> MicroBatch:
        runs: list[_Run] = []
        for tree, nodes in sorted(bin.nodes.items()):
            _append_runs(runs, self._trees[tree], nodes)
        lengths = [sum(map(len, run.parts)) for run in runs]
        starts = np.cumsum([0, *lengths])
        segments = (
            Segment(parent=run.parent, start=int(start), length=length, episode=run.episode, branch=run.branch or 0)
            for run, start, length in zip(runs, starts[:-1], lengths, strict=True)
        )
        return MicroBatch(
            columns=TokenColumns.join([part for run in runs for part in run.parts]),
            segments=tuple(segments),
            pass_tokens=self._limit if bin.size > self._limit else None,
        )


def _append_runs(runs: list[_Run], tree: GroupTree, nodes: set[int]) -> None:
    """One run per node, except that an only child of the same owner lengthens its parent's, unless both were sampled on different
    branches."""
    run_of = {-1: -1}
    for number in tree.preorder():
        if number not in nodes:
            continue
        node = tree.nodes[number]
        columns = node.columns if node.sampled else node.columns.freeze().with_credit(None)
        parent = run_of[node.parent]
        only_child = sum(child in nodes for child in tree.children(node.parent)) == 1
        apart = node.sampled and parent >= 0 and runs[parent].branch not in (None, node.branch)
        if parent >= 0 and only_child and runs[parent].episode == node.owner and not apart:
            runs[parent].parts.append(columns)
            run_of[number] = parent
        else:
            runs.append(_Run(parent, node.owner, [columns]))
            run_of[number] = len(runs) - 1
        if node.sampled:
            runs[run_of[number]].branch = node.branch
