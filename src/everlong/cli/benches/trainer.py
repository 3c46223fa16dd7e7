"""The trainer's gradient: the chunked head against whole logits, trees against their branches, and a tree larger than one pass.

`chunked_head`: logprobs of 4096 tokens over 49,152 ids (SmolLM2's) and their gradient in float32, against logits and log-softmax in one
piece. `tree-*`: the committed shapes of `agent_trees.json` against the same branches as a row each, on a llama of 7M parameters
whose attention takes about the share of its time that it has in one of 7B over 8000 tokens; the gradients are compared first. The
ratio of `time` is the speed-up, that of `tokens` what it could be if nothing but tokens counted. `tree-200k`: one episode of 200,000
tokens on the toy, in parts of 4096, against an equal tree that one pass takes; its memory against a bound.
Memory is a child process's own, above what weights and inputs take.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass

from everlong.cli.bench import Row
from everlong.cli.benches.agent_trees import GroupShape, Shape, group_of, read_shapes
from everlong.cli.benches.apart import run_apart
from everlong.cli.benches.timing import interleaved
from everlong.contracts.records import EpisodeShare, MicroBatch, ScoredGroup, Segment, TrainBatch
from everlong.contracts.tokens import TokenColumns
from everlong.trajectories.admission import AdmissionConfig, admit_group
from everlong.trajectories.packing import PackingConfig, pack_batch
from everlong.trajectories.tree import EpisodeTree

PASS_TOKENS = 4096
EVERY_BRANCH = AdmissionConfig(zero_signal="keep", max_branches=10_000)
LARGE_TOKENS = 200_100
"""Some contexts begin alike by chance and are merged: 200,054 are left."""
BOUND_BYTES = 1 << 30
"""Of tree-200k, above weights and tokens."""


@dataclass(frozen=True, slots=True)
class HeadSize:
    num_tokens: int = 4096
    vocab_size: int = 49152
    width: int = 576
    chunk_tokens: int = 256
    """The fastest of 128, 256 and 512 on the machine this was written on."""


def measure() -> list[Row]:
    rows = chunked_head(HeadSize())
    for name, shape in read_shapes().items():
        rows += tree_against_flat(name, shape)
    return rows + large_tree(LARGE_TOKENS)


# The head ------------------------------------------------------------------------------------------------------------


def chunked_head(size: HeadSize, repeats: int = 3) -> list[Row]:
    ways = [("chunked", *astuple(size)), ("plain", *astuple(size))]
    ours, plain = interleaved(*(HeadCase(*way).run for way in ways), repeats=repeats)
    peak, plain_peak = (run_apart(f"{__name__}:HeadCase", *way).peak_bytes for way in ways)
    return [
        Row("chunked_head", "time", "s", ours, "plain", plain, plain / ours),
        Row("chunked_head", "peak_memory", "bytes", peak, "plain", plain_peak, plain_peak / peak),
    ]


class HeadCase:
    """Logprobs of random labels under random states, and the gradient of their sum."""

    def __init__(self, way: str, num_tokens: int, vocab_size: int, width: int, chunk_tokens: int) -> None:
        import torch

        from everlong.models.llama.config import LlamaConfig

        generator = torch.Generator().manual_seed(0)
        self._way, self._chunk_tokens = way, chunk_tokens
        self._config = LlamaConfig(
            vocab_size=vocab_size, padded_vocab_size=vocab_size, hidden_size=width, intermediate_size=1, num_layers=0,
            num_heads=1, num_kv_heads=1, head_dim=2,
        )  # fmt: skip
        self._hidden = torch.randn(num_tokens, width, generator=generator, requires_grad=True)
        self._weight = torch.randn(vocab_size, width, generator=generator).mul_(0.02).requires_grad_()
        self._labels = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
        self._ones = torch.ones(num_tokens)

    def run(self) -> None:
        import torch

        torch.autograd.grad(self._logprobs().sum(), (self._hidden, self._weight))

    def _logprobs(self):
        from everlong.models.head import token_logprobs
        from everlong.models.numerics import Numerics

        if self._way == "plain":
            logits = self._hidden @ self._weight.T
            return logits.log_softmax(-1).gather(-1, self._labels[:, None])[:, 0]
        return token_logprobs(
            self._hidden, self._weight, self._config, self._labels, self._ones, None, Numerics.FAST,
            self._chunk_tokens,
        )[0]  # fmt: skip


# Trees ---------------------------------------------------------------------------------------------------------------


def tree_against_flat(name: str, shape: GroupShape, width: int = 384, repeats: int = 3) -> list[Row]:
    """Raises AssertionError where the two are not the same gradient."""
    group = group_of(0, shape, vocab_size=260)
    tree, flat = packed(group), flattened(group)
    ours, reference = Gradients(tree, width, "sum_over_leaves"), Gradients(flat, width, "once")
    ours.check(reference)
    seconds, flat_seconds = interleaved(ours.run, reference.run, repeats)
    tokens, flat_tokens = (float(sum(len(m.columns) for m in batch.micro_batches)) for batch in (tree, flat))
    return [
        Row(name, "time", "s", seconds, "flat", flat_seconds, flat_seconds / seconds),
        Row(name, "tokens", "tokens", tokens, "flat", flat_tokens, flat_tokens / tokens),
    ]


def packed(group: ScoredGroup, pass_tokens: int = PASS_TOKENS) -> TrainBatch:
    return pack_batch(0, [group], PackingConfig(micro_batch_tokens=pass_tokens), EVERY_BRANCH, seed=0).train_batch


def flattened(group: ScoredGroup) -> TrainBatch:
    """Every branch as a row of its own, all of whose sampled tokens train; as many rows pass at once as fit."""
    rows, shares = [], []
    for number, admitted in enumerate(admit_group(group, EVERY_BRANCH, 0)):
        tree, count = EpisodeTree(admitted.episode.turns), 0
        for branch, admission in enumerate(admitted.branches):
            columns = tree.columns(admitted.episode.turns[admission.path[-1]]).with_credit(admitted.credit)
            segment = Segment(parent=-1, start=0, length=len(columns), episode=number, branch=branch)
            rows.append(MicroBatch(columns=columns, segments=(segment,)))
            count += columns.num_trainable
        shares.append(EpisodeShare(episode=admitted.episode.id, group=0, num_trainable=count))
    return TrainBatch(batch=0, micro_batches=tuple(_joined(rows)), episodes=tuple(shares))


def _joined(rows: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
    """Rows side by side, up to the limit."""
    columns, segments, size = [], [], 0
    for row in rows:
        if columns and size + len(row.columns) > PASS_TOKENS:
            yield MicroBatch(columns=TokenColumns.join(columns), segments=tuple(segments))
            columns, segments, size = [], [], 0
        (segment,) = row.segments
        segments.append(
            Segment(parent=-1, start=size, length=segment.length, episode=segment.episode, branch=segment.branch)
        )
        columns.append(row.columns)
        size += len(row.columns)
    yield MicroBatch(columns=TokenColumns.join(columns), segments=tuple(segments))


class Gradients:
    """The gradient of a batch on a random llama, as a training step takes it."""

    def __init__(self, batch: TrainBatch, width: int, shared_prefix: str) -> None:
        from everlong.models.llama.config import LlamaConfig
        from everlong.models.toy import random_llama
        from everlong.trainer.config import RatioConfig, SapoConfig
        from everlong.trainer.objective import Objective
        from everlong.trainer.preparation import prepare_batch

        config = LlamaConfig(
            vocab_size=260, padded_vocab_size=264, hidden_size=width, intermediate_size=width * 8 // 3, num_layers=4,
            num_heads=width // 64, num_kv_heads=width // 64 // 2 or 1, head_dim=64,
        )  # fmt: skip
        self._model = random_llama(config, seed=0)
        self._objective = Objective(SapoConfig(), RatioConfig(), shared_prefix=shared_prefix)  # ty: ignore[invalid-argument-type]
        self._batch = prepare_batch(batch, self._objective, config)

    def run(self):
        from everlong.trainer.step import batch_gradient, deterministic
        from everlong.trainer.tally import Tally

        with deterministic():
            return batch_gradient(self._model, self._batch, self._objective, None, 512, Tally()).gradient

    def check(self, other: Gradients) -> None:
        pairs = list(zip(self.run(), other.run(), strict=True))
        distance = sum(float((ours - theirs).square().sum()) for ours, theirs in pairs) ** 0.5
        norm = sum(float(theirs.square().sum()) for _, theirs in pairs) ** 0.5
        assert distance < 1e-3 * norm, f"the tree's gradient is {distance / norm:.1e} of its norm from its branches'"


# A tree larger than one pass -----------------------------------------------------------------------------------------


def large_tree(num_tokens: int, pass_tokens: int = PASS_TOKENS, bound_bytes: int = BOUND_BYTES) -> list[Row]:
    case, name = f"tree-{num_tokens // 1000}k", f"{__name__}:LargeTree"
    small = run_apart(name, pass_tokens, pass_tokens)
    large = run_apart(name, num_tokens, pass_tokens)
    ours, reference = (tokens / cost.seconds for tokens, cost in ((num_tokens, large), (pass_tokens, small)))
    return [
        Row(case, "tokens_per_s", "1/s", ours, "one pass", reference, ours / reference),
        Row(case, "peak_memory", "bytes", large.peak_bytes, "bound", bound_bytes, bound_bytes / large.peak_bytes),
    ]


class LargeTree:
    """An episode of segments behind one system prompt, as compactions leave them, each with a turn taken back."""

    def __init__(self, num_tokens: int, pass_tokens: int) -> None:
        from everlong.models.toy import build_toy
        from everlong.trainer.config import RatioConfig, SapoConfig
        from everlong.trainer.objective import Objective
        from everlong.trainer.preparation import prepare_batch

        group = group_of(0, GroupShape(300, (compacted(num_tokens),)), vocab_size=260)
        self._model = build_toy(0)
        self._objective = Objective(SapoConfig(), RatioConfig())
        self._batch = prepare_batch(packed(group, pass_tokens), self._objective, self._model.config)

    def run(self) -> None:
        from everlong.trainer.step import batch_gradient, deterministic
        from everlong.trainer.tally import Tally

        with deterministic():
            batch_gradient(self._model, self._batch, self._objective, None, 128, Tally())


def compacted(num_tokens: int, prompt: int = 300, turn: int = 120) -> tuple[Shape, ...]:
    """Turns of `turn` tokens, eight to a segment and two more where the last two are taken back; `num_tokens` in all."""
    turns: list[Shape] = []
    left = num_tokens - prompt
    while left >= turn:
        first, added = len(turns), prompt
        for parent in (
            -1,
            first,
            first + 1,
            first + 2,
            first + 3,
            first + 4,
            first + 5,
            first + 6,
            first + 5,
            first + 8,
        ):
            if left >= turn:
                size = turn if left >= 2 * turn else left  # the last takes the rest
                turns.append((parent, 0, added + size - 40, 40))
                left, added = left - size, 0
    return tuple(turns)
