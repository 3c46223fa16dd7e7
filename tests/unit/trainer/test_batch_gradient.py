"""The gradient of a whole batch on a tiny llama: against an independent float64 reference, and however it is cut."""

import math

import msgspec
import numpy as np
import pytest
import torch
from tests.unit.trainer.tiny import SHAPE, tiny

from everlong.contracts.records import EpisodeShare, MicroBatch, Segment, TrainBatch
from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.trainer.config import (
    GrpoConfig,
    GspoConfig,
    GspoTokenConfig,
    RatioConfig,
    SapoConfig,
    TokenMask,
    TokenTruncation,
)
from everlong.trainer.objective import Objective
from everlong.trainer.preparation import prepare_batch
from everlong.trainer.replay import predecessors
from everlong.trainer.step import batch_gradient
from everlong.trainer.tally import Tally

KEPT = KeptSets.from_rows([[1, 4, 7], [], [5]])
PROMPT = TokenColumns.context([3, 9, 2])
SHARED = TokenColumns.sampled_tokens([2, 3], [-1.5, -2.5], version=0, temperature=0.7).with_credit(0.8)
LEFT = TokenColumns.sampled_tokens([4, 8, 5], [-1.0, -3.0, 0.0], version=0, kept=KEPT).with_credit(0.8)
RIGHT = TokenColumns.sampled_tokens([5, 6], [-2.0, -1.0], version=1, temperature=1.3).with_credit(-1.1)
IMITATED = TokenColumns.supervised([7, 7, 1])


@pytest.fixture
def model():
    return tiny()


def packed(*pieces):
    """A micro-batch of (parent, episode, columns)."""
    segments, at = [], 0
    for parent, episode, columns in pieces:
        segments.append(Segment(parent=parent, start=at, length=len(columns), episode=episode))
        at += len(columns)
    return MicroBatch(columns=TokenColumns.join([p[2] for p in pieces]), segments=tuple(segments))


def batched(*micro_batches, counts):
    shares = tuple(EpisodeShare(episode=f"e{i}", group=0, num_trainable=n) for i, n in enumerate(counts))
    return TrainBatch(batch=0, micro_batches=micro_batches, episodes=shares)


TREE = packed((-1, -1, PROMPT), (0, 0, SHARED), (1, 0, LEFT), (1, 0, RIGHT), (0, 1, IMITATED))
FLAT = (
    packed((-1, -1, PROMPT), (0, 0, SHARED + LEFT)),
    packed((-1, -1, PROMPT), (0, 0, SHARED.freeze() + RIGHT)),
    packed((-1, -1, PROMPT), (0, 1, IMITATED)),
)
COUNTS = (7, 3)


def gradient_of(model, batch, loss=None, ratio=None, starts=None, chunk=512):
    objective = Objective(loss or GrpoConfig(), ratio or RatioConfig())
    tally = Tally()
    got = batch_gradient(model, prepare_batch(batch, objective, SHAPE), objective, starts, chunk, tally)
    return got, tally.metrics()


def assert_same(got, expected, rtol=2e-5, atol=2e-6):
    assert got.loss == pytest.approx(expected.loss, rel=1e-5)
    for mine, other in zip(got.gradient, expected.gradient, strict=True):
        torch.testing.assert_close(mine, other, rtol=rtol, atol=atol)


# An independent reference: one row per branch, dense attention, float64 ----------------------------------------------


def reference_norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + SHAPE.rms_norm_eps).sqrt() * weight


def reference_rotate(x):
    half = SHAPE.head_dim // 2
    frequency = SHAPE.rope_theta ** (-torch.arange(half, dtype=torch.float64) * 2 / SHAPE.head_dim)
    angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def reference_hidden(weights, ids):
    """[T, M] after the final norm, of one row of tokens."""
    x = weights["model.embed_tokens.weight"][ids]
    causal = torch.ones(len(ids), len(ids)).tril().bool()
    for layer in range(SHAPE.num_layers):
        w = {k.removeprefix(f"model.layers.{layer}."): v for k, v in weights.items() if f"layers.{layer}." in k}
        y = reference_norm(x, w["input_layernorm.weight"])
        q, k, v = ((y @ w[f"self_attn.{n}_proj.weight"].T).view(len(ids), -1, SHAPE.head_dim) for n in ("q", "k", "v"))
        q, k = reference_rotate(q), reference_rotate(k)
        heads = []
        for head in range(SHAPE.num_heads):
            group = head * SHAPE.num_kv_heads // SHAPE.num_heads
            scores = (q[:, head] @ k[:, group].T / math.sqrt(SHAPE.head_dim)).masked_fill(~causal, -math.inf)
            heads.append(scores.softmax(-1) @ v[:, group])
        x = x + torch.cat(heads, -1) @ w["self_attn.o_proj.weight"].T
        y = reference_norm(x, w["post_attention_layernorm.weight"])
        gate, up = y @ w["mlp.gate_proj.weight"].T, y @ w["mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T
    return reference_norm(x, weights["model.norm.weight"])


def reference_logits(weights, ids):
    return reference_hidden(weights, ids) @ weights["model.embed_tokens.weight"].T


def reference_logprob(logits, columns, token):
    """Of `token`, from the logits of the one before it."""
    scaled = logits[token - 1, : SHAPE.vocab_size]
    if columns.sampled[token]:
        scaled = scaled / float(columns.temperatures[token])
    row = columns.kept.row(token)
    label = int(columns.ids[token])
    support = scaled[torch.from_numpy(row.astype(np.int64))] if len(row) else scaled
    return scaled[label] - support.logsumexp(-1)


def reference_loss(weights, rows, counts, term, reduction):
    """`rows` are (episode, columns of a whole branch); `term` gives a sampled token's loss from its logprob."""
    total = torch.zeros((), dtype=torch.float64)
    for episode, columns in rows:
        logits = reference_logits(weights, torch.from_numpy(columns.ids.astype(np.int64)))
        for token in np.flatnonzero(columns.trainable):
            logprob = reference_logprob(logits, columns, token)
            loss = term(logprob, columns, token) if columns.sampled[token] else -logprob
            total = total + loss / (1 if reduction == "token" else counts[episode])
    return total / (sum(counts) if reduction == "token" else len(counts))


def grpo_term(logprob, columns, token):
    ratio, credit = (logprob - float(columns.logprobs[token])).exp(), float(columns.credit[token])
    value = torch.minimum(ratio * credit, ratio.clamp(0.8, 1.28) * credit)
    return -(torch.maximum(value, torch.tensor(3.0 * credit)) if credit < 0 else value)


def sapo_term(logprob, columns, token):
    ratio, credit = (logprob - float(columns.logprobs[token])).exp(), float(columns.credit[token])
    tau = 1.0 if credit > 0 else 1.05
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * credit


@pytest.mark.parametrize("reduction", ["token", "episode"])
@pytest.mark.parametrize(("loss", "term"), [(GrpoConfig, grpo_term), (SapoConfig, sapo_term)], ids=["grpo", "sapo"])
@pytest.mark.parametrize("batch", [batched(TREE, counts=COUNTS), batched(*FLAT, counts=COUNTS)], ids=["tree", "flat"])
def test_loss_and_gradient_equal_an_independent_reference(model, batch, loss, term, reduction):
    weights = {name: w.detach().double().requires_grad_() for name, w in model.named_weights().items()}
    rows = [(0, PROMPT + SHARED + LEFT), (0, PROMPT + SHARED.freeze() + RIGHT), (1, PROMPT + IMITATED)]
    expected = reference_loss(weights, rows, COUNTS, term, reduction)
    got, _ = gradient_of(model, batch, loss(reduction=reduction), chunk=3)
    assert got.loss == pytest.approx(expected.item(), rel=1e-5)
    for mine, other in zip(got.gradient, torch.autograd.grad(expected, list(weights.values())), strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=2e-6)
    assert max(part.abs().max() for part in got.gradient) > 1e-2


# The cut -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "micro_batches",
    [
        pytest.param(FLAT, id="three rows"),
        pytest.param(FLAT[::-1], id="another order"),
        pytest.param((FLAT[0], packed((-1, -1, PROMPT)), *FLAT[1:]), id="one without trained tokens"),
        pytest.param(
            (packed((-1, -1, PROMPT), (0, 0, SHARED), (1, 0, LEFT), (-1, -1, PROMPT), (3, 1, IMITATED)), FLAT[1]),
            id="two trees in one micro-batch",
        ),
    ],
)
def test_the_gradient_does_not_depend_on_the_cut(model, micro_batches):
    expected, _ = gradient_of(model, batched(TREE, counts=COUNTS))
    got, _ = gradient_of(model, batched(*micro_batches, counts=COUNTS))
    assert_same(got, expected)


def test_a_shared_token_trained_in_both_branches_would_show(model):
    expected, _ = gradient_of(model, batched(TREE, counts=COUNTS))
    twice = packed((-1, -1, PROMPT), (0, 0, SHARED + RIGHT))
    got, _ = gradient_of(model, batched(FLAT[0], twice, FLAT[2], counts=(9, 3)))
    assert max((a - b).abs().max() for a, b in zip(got.gradient, expected.gradient, strict=True)) > 1e-3


def test_the_same_batch_gives_the_same_bits(model):
    first, _ = gradient_of(model, batched(*FLAT, counts=COUNTS))
    second, _ = gradient_of(model, batched(*FLAT, counts=COUNTS))
    assert first.loss == second.loss
    assert all(torch.equal(a, b) for a, b in zip(first.gradient, second.gradient, strict=True))


def test_ragged_micro_batches_lose_and_double_no_token(model):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, 13)
    parts = [
        TokenColumns.sampled_tokens(rng.integers(0, 11, n), -rng.random(n), version=0).with_credit(float(rng.normal()))
        for n in lengths
    ]
    pieces = [(0, i, part) for i, part in enumerate(parts)]
    cut = [packed((-1, -1, PROMPT), *pieces[start : start + 4]) for start in range(0, 13, 4)]
    got, metrics = gradient_of(model, batched(*cut, counts=tuple(map(int, lengths))))
    expected, _ = gradient_of(model, batched(packed((-1, -1, PROMPT), *pieces), counts=tuple(map(int, lengths))))
    assert_same(got, expected)
    assert sum(len(start.proximal_P) for start in got.starts) == lengths.sum()
    assert metrics["ratio/max"] > 0


# What contributes nothing --------------------------------------------------------------------------------------------


def test_masked_tokens_contribute_exactly_nothing_whatever_their_logprob(model):
    kept, _ = gradient_of(model, batched(packed((-1, -1, PROMPT), (0, 0, LEFT)), counts=(3,)))
    ghosts = TokenColumns.sampled_tokens([1, 2, 3], [-1.0, -1.0, -1.0], version=0).replace(
        logprobs=np.array([-np.inf, np.nan, -1.0], np.float32)
    )
    ghosts = ghosts.with_credit(1.0).replace(trainable=np.zeros(3, bool))
    got, _ = gradient_of(model, batched(packed((-1, -1, PROMPT), (0, 0, LEFT), (0, 1, ghosts)), counts=(3, 0)))
    assert_same(got, kept, rtol=1e-6, atol=1e-7)


def test_tokens_without_verdict_contribute_exactly_nothing(model):
    kept, _ = gradient_of(model, batched(packed((-1, -1, PROMPT), (0, 0, LEFT)), counts=(3,)))
    unjudged = RIGHT.with_credit(None)
    got, _ = gradient_of(model, batched(packed((-1, -1, PROMPT), (0, 0, LEFT), (0, 1, unjudged)), counts=(3, 0)))
    assert_same(got, kept, rtol=1e-6, atol=1e-7)


# Ratios --------------------------------------------------------------------------------------------------------------


def test_own_logprobs_are_the_proximal_ones_of_the_first_update(model):
    ratio = RatioConfig(base="proximal", correction=TokenTruncation(cap=2.0))
    first, metrics = gradient_of(model, batched(TREE, counts=COUNTS), GrpoConfig(), ratio)
    assert metrics["ratio/max"] == metrics["ratio/mean"] == 1.0
    again, metrics = gradient_of(model, batched(TREE, counts=COUNTS), GrpoConfig(), ratio, starts=first.starts)
    assert metrics["ratio/max"] == 1.0
    assert_same(again, first, rtol=0, atol=0)


def test_corrections_weigh_the_tokens_and_leave_the_denominator(model):
    batch = batched(packed((-1, -1, PROMPT), (0, 0, RIGHT)), counts=(2,))
    own = gradient_of(model, batch)[0].starts[0].proximal_P.double()
    rho = (own - torch.from_numpy(RIGHT.logprobs).double()).exp()
    low = float(rho.mean())  # rejects one of the two
    config = TokenMask(low=min(low, 0.99), high=100.0)
    assert (rho < config.low).sum() == 1
    ratio = RatioConfig(base="proximal", correction=config)
    got, metrics = gradient_of(model, batch, GrpoConfig(), ratio)
    assert metrics["correction/rejected"] == 0.5
    assert got.loss == pytest.approx(1.1 * float(rho.max()) / 2, rel=1e-5)


# Records -------------------------------------------------------------------------------------------------------------


def test_a_token_is_predicted_by_the_one_before_it_on_its_path():
    assert predecessors(TREE.segments, len(TREE.columns)).tolist() == [-1, 0, 1, 2, 3, 4, 5, 6, 4, 8, 2, 10, 11]


@pytest.mark.parametrize(
    ("micro_batch", "counts", "message"),
    [
        pytest.param(FLAT[0], (4,), "says 4 trainable tokens, its columns hold 5", id="a wrong count"),
        pytest.param(packed((-1, 0, LEFT)), (3,), "which nothing predicts", id="no context"),
        pytest.param(packed((-1, -1, PROMPT), (0, -1, LEFT)), (0,), "shared prompt", id="a trained prompt"),
        pytest.param(
            packed((-1, -1, TokenColumns.context([11])), (0, 0, LEFT)), (3,), "id 11, the model knows 0 to 10",
            id="an unknown id",
        ),
        pytest.param(
            packed((-1, -1, TokenColumns.context([1] * 62)), (0, 0, LEFT)), (3,), "65 tokens, the model takes 64",
            id="too long",
        ),
        pytest.param(
            packed((-1, -1, PROMPT), (0, 0, LEFT.replace(logprobs=np.full(3, np.nan, np.float32)))), (3,),
            "logprob nan", id="no sampling logprob",
        ),
    ],
)  # fmt: skip
def test_a_record_that_does_not_hold_together_is_refused(micro_batch, counts, message):
    with pytest.raises(ValueError, match=message):
        prepare_batch(batched(micro_batch, counts=counts), Objective(GrpoConfig(), RatioConfig()), SHAPE)


# Branches ------------------------------------------------------------------------------------------------------------


def branched(index):
    """The flat rows, with the second row's own tokens as branch `index` of the episode."""
    second = FLAT[1]
    segments = tuple(msgspec.structs.replace(segment, branch=index) for segment in second.segments)
    return FLAT[0], MicroBatch(columns=second.columns, segments=segments), FLAT[2]


def test_a_branch_that_trains_in_two_micro_batches_has_no_ratio(model):
    """Where every token has its own ratio nothing is wrong with it."""
    for objective in (
        Objective(GspoConfig(), RatioConfig()),
        Objective(GrpoConfig(), RatioConfig(off_policy_drop=0.1)),
    ):
        with pytest.raises(ValueError, match="branch 0 of episode e0 trains in micro-batches 0 and 1"):
            prepare_batch(batched(*branched(0), counts=COUNTS), objective, SHAPE)
        assert prepare_batch(batched(*branched(1), counts=COUNTS), objective, SHAPE).num_trained == 10
    assert (
        prepare_batch(batched(*branched(0), counts=COUNTS), Objective(GrpoConfig(), RatioConfig()), SHAPE).num_trained
        == 10
    )


def test_one_ratio_for_a_branch_needs_one_credit_for_it(model):
    uneven = LEFT.replace(credit=np.array([0.8, 0.8, -0.3], np.float32))
    batch = batched(packed((-1, -1, PROMPT), (0, 0, uneven)), counts=(3,))
    for loss in (GspoConfig(), GrpoConfig(level="sequence")):
        with pytest.raises(ValueError, match="take loss gspo_token, or loss.level=sequence_token"):
            prepare_batch(batch, Objective(loss, RatioConfig()), SHAPE)
    for loss in (GspoTokenConfig(), GrpoConfig(level="sequence_token"), GrpoConfig()):
        got, _ = gradient_of(model, batch, loss)
        assert all(part.isfinite().all() for part in got.gradient)


# The logit gradient --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("projection", ["mean", "exact_target"])
def test_a_projection_reaches_every_trained_token_and_changes_rounding_alone(model, projection):
    batch = batched(TREE, counts=COUNTS)
    plain, _ = gradient_of(model, batch)
    objective = Objective(GrpoConfig(), RatioConfig(), projection=projection)
    got = batch_gradient(model, prepare_batch(batch, objective, SHAPE), objective, None, 3, Tally())
    assert_same(got, plain)
    assert not all(torch.equal(a, b) for a, b in zip(got.gradient, plain.gradient, strict=True))
