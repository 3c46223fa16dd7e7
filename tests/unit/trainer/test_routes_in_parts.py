"""Routes over trees: they follow their tokens however a tree is laid out and cut, and are counted once."""

import asyncio

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.unit.models.forests import forests, path_of
from tests.unit.trainer.tiny import moe_shape, tiny_moe

from everlong.contracts.decisions import Decisions
from everlong.contracts.records import EpisodeShare, MicroBatch, ScoreRequest, Segment, TrainBatch
from everlong.contracts.tokens import TokenColumns
from everlong.models.attention import TreeAttention
from everlong.models.decisions import Recorder, Replay, TokenRecorder
from everlong.models.moe.config import EXPERT_WEIGHTS, EXPERTS
from everlong.models.numerics import Numerics
from everlong.models.tree_pass import read_states
from everlong.storage import open_store
from everlong.trainer.config import AdamWConfig, GrpoConfig, KlLoss, RatioConfig, ReplayConfig, TrainerConfig
from everlong.trainer.objective import Objective
from everlong.trainer.preparation import prepare_batch
from everlong.trainer.ranks.ranks import Alone
from everlong.trainer.replay import predecessors, rows_of
from everlong.trainer.scoring import score_rows
from everlong.trainer.step import with_own_decisions
from everlong.trainer.trainer import PolicyTrainer
from everlong.weights import WeightPublisher

SHAPE = moe_shape()
TREE = [(-1, -1, 3), (0, 0, 2), (1, 0, 2), (1, 0, 5), (0, 1, 12)]
"""The second episode and the second branch are the heavier ones, so tokens are laid out in another order than they are packed."""
LIMITS = [1, 7, 23]


def forest_of(segments, pass_tokens=None):
    total = sum(length for _, _, length in segments)
    columns = TokenColumns.sampled_tokens(np.arange(total) * 7 % 11, np.full(total, -1.5), version=0)
    segments = tuple(Segment(parent=p, start=s, length=n, episode=0) for p, s, n in segments)
    return MicroBatch(columns=columns.with_credit(1.0), segments=segments, pass_tokens=pass_tokens)


def random_rows(total, seed, with_weights):
    """Of some tokens, as `Replay` takes them: other experts than a router would choose."""
    rng = np.random.default_rng(seed)
    routes = np.argsort(rng.random((total, 2, 4)), axis=-1)[..., :2]
    weights, bare = rng.random((total, 2, 2)), rng.random(total) < 0.2
    routes[bare], weights[bare] = -1, np.nan
    rows = {EXPERTS: torch.from_numpy(routes)}
    return {**rows, EXPERT_WEIGHTS: torch.from_numpy(weights)} if with_weights else rows


def scored(model, micro_batch, replay):
    """Logprobs, and the gradient of their weighted sum as one vector."""
    rows = rows_of(micro_batch, micro_batch.columns.sampled)
    logprobs = score_rows(model, micro_batch, rows, 5, decide=replay).logprobs_R
    weights = list(model.trained_weights().values())
    total = (logprobs * torch.linspace(-1, 1, len(rows), dtype=logprobs.dtype)).sum()
    found = torch.autograd.grad(total, weights, allow_unused=True)
    parts = [torch.zeros_like(w) if g is None else g for w, g in zip(weights, found, strict=True)]
    return logprobs.detach(), torch.cat([part.flatten() for part in parts])


def states(model, micro_batch, decide):
    tokens = np.arange(len(micro_batch.columns))
    return read_states(model, (), micro_batch, tokens, lambda hidden, _: (hidden,), decide)[0]


def states_of_row(model, ids, decide):
    attend = TreeAttention([(-1, 0, len(ids))], SHAPE.head_dim**-0.5, model.numerics)
    return model(torch.from_numpy(ids.astype(np.int64)), torch.arange(len(ids)), attend, decide)


@settings(max_examples=25, deadline=None)
@given(
    forests().filter(lambda forest: sum(length for *_, length in forest) > 1),
    st.integers(1, 30),
    st.integers(0, 99),
    st.booleans(),
)
def test_replayed_routes_in_parts_give_the_logprobs_and_the_gradient_of_one_pass(segments, limit, seed, with_weights):
    """To 1e-10 in float64, and what is replayed is counted once."""
    model, whole, cut = tiny_moe(dtype=torch.float64), forest_of(segments), forest_of(segments, limit)
    if not len(rows_of(whole, whole.columns.sampled)):
        return
    rows = random_rows(len(whole.columns), seed, with_weights)
    at_once, in_parts = Replay(rows), Replay(rows)
    logprobs, gradient = scored(model, whole, at_once)
    logprobs_in_parts, gradient_in_parts = scored(model, cut, in_parts)
    assert torch.allclose(logprobs_in_parts, logprobs, rtol=1e-10, atol=1e-12)
    assert float((gradient_in_parts - gradient).norm()) <= 1e-10 * float(gradient.norm())
    for name, share in at_once.shares().items():
        assert share.numel() == in_parts.shares()[name].numel()
        assert share.double().mean() == pytest.approx(float(in_parts.shares()[name].double().mean()), nan_ok=True)


@settings(max_examples=25, deadline=None)
@given(forests(), st.one_of(st.none(), st.integers(1, 30)), st.integers(0, 99))
@torch.no_grad()
def test_rows_are_those_of_the_tokens_in_a_row_of_their_own(segments, limit, seed):
    """What is replayed reaches the token that it is of, and what is recorded comes back as that of the token that it was of."""
    model, micro_batch = tiny_moe(dtype=torch.float64), forest_of(segments, limit)
    rows, recorder = random_rows(len(micro_batch.columns), seed, True), TokenRecorder()
    replayed, _ = states(model, micro_batch, Replay(rows)), states(model, micro_batch, recorder)
    for index in range(len(segments)):
        path = path_of(segments, index)
        if not path:
            continue
        ids, alone = micro_batch.columns.ids[path], Recorder()
        expected = states_of_row(model, ids, Replay({name: own[path] for name, own in rows.items()}))
        assert torch.allclose(replayed[path], expected, rtol=1e-10, atol=1e-12)
        states_of_row(model, ids, alone)
        assert torch.equal(recorder.rows()[EXPERTS][path], alone.rows()[EXPERTS])
        assert torch.allclose(recorder.rows()[EXPERT_WEIGHTS][path], alone.rows()[EXPERT_WEIGHTS], rtol=1e-10)


class Watch:
    """The network's own choices, of the first pass of a token and of the second."""

    def __init__(self):
        self.seen = {False: {}, True: {}}

    def of(self, tokens, *, again):
        def decide(name, place, own):
            for token, row in zip(tokens.tolist(), own.tolist(), strict=True):
                self.seen[again][name, place, token] = row
            return own

        return decide


@pytest.mark.parametrize("numerics", list(Numerics))
def test_a_part_that_passes_again_decides_the_same(numerics):
    """To the bit, weights too: its gradient is of the pass that was scored."""
    starts = np.cumsum([0, *(length for *_, length in TREE)])
    segments = [(parent, int(start), length) for (parent, _, length), start in zip(TREE, starts, strict=False)]
    model, watch = tiny_moe(numerics), Watch()
    scored(model, forest_of(segments, 5), watch)
    first, second = watch.seen.values()
    assert len(first) == 2 * 2 * 24 and first == second


# In the trainer ------------------------------------------------------------------------------------------------------


def episodes_of(pass_tokens=None, *, seed=0):
    """Two episodes with routes on record: at each token the row of the one before it on its path."""
    segments, at = [], 0
    for number, (parent, episode, length) in enumerate(TREE):
        segments.append(Segment(parent=parent, start=at, length=length, episode=episode, branch=int(number == 3)))
        at += length
    ids = np.arange(at) * 5 % 11
    columns = TokenColumns.sampled_tokens(ids[3:], np.full(at - 3, -1.5, np.float32), version=0)
    columns = columns.replace(credit=np.float32([0.8] * 9 + [-1.1] * 12))
    columns = TokenColumns.context(ids[:3]) + columns
    before, rows = predecessors(segments, at), np.full((at, 2, 2), 255, np.uint8)
    of_pass = random_rows(at, seed, False)[EXPERTS].numpy()
    of_pass = np.where(of_pass < 0, [0, 3], of_pass).astype(np.uint8)
    rows[before >= 0] = of_pass[before[before >= 0]]
    columns = columns.replace(decisions=Decisions(num_tokens=at, rows={EXPERTS: rows}))
    return MicroBatch(columns=columns, segments=tuple(segments), pass_tokens=pass_tokens)


def batch_of(*micro_batches):
    shares = [
        EpisodeShare(episode=f"e{index}{episode}", group=index, num_trainable=count)
        for index in range(len(micro_batches))
        for episode, count in ((0, 9), (1, 12))
    ]
    moved = []
    for index, micro_batch in enumerate(micro_batches):
        segments = [
            replace(segment, episode=segment.episode + 2 * index if segment.episode >= 0 else -1)
            for segment in micro_batch.segments
        ]
        moved.append(replace(micro_batch, segments=tuple(segments)))
    return TrainBatch(batch=0, micro_batches=tuple(moved), episodes=tuple(shares))


async def trained(replay, pass_tokens):
    """Metrics of a batch of two updates with a KL term, scores before it, and how it moved the weights."""
    store, model = open_store("memory://"), tiny_moe(Numerics.ALIGNED)
    trainer = PolicyTrainer(
        model, config=TrainerConfig(updates_per_batch=2), loss=GrpoConfig(),
        ratio=RatioConfig(), optimizer=AdamWConfig(learning_rate=1e-3), numerics=model.numerics, store=store,
        kl=KlLoss(), replay=replay, publisher=WeightPublisher(store, 10), seed=0, lease=asyncio.Lock(),
    )  # fmt: skip
    before = torch.cat([weight.detach().flatten() for weight in model.trained_weights().values()])
    batch = batch_of(episodes_of(pass_tokens), episodes_of(pass_tokens, seed=1))
    scores = await trainer.score(ScoreRequest(micro_batches=batch.micro_batches))
    metrics = (await trainer.train(batch)).metrics
    await trainer.close()
    moved = torch.cat([weight.detach().flatten() for weight in model.trained_weights().values()]) - before
    return {name: m for name, m in metrics.items() if not name.startswith("seconds/")}, scores.logprobs, moved


@pytest.mark.parametrize(
    "replay",
    [ReplayConfig(), ReplayConfig(routes="rollout"), *(ReplayConfig(routes="recompute", weights=w) for w in ("recomputed", "recorded"))],
    ids=lambda replay: f"{replay.routes}-{replay.weights}",
)  # fmt: skip
async def test_a_trainer_replays_over_trees_in_parts_what_it_does_over_whole_ones(replay):
    metrics, scores, moved = await trained(replay, None)
    for limit in LIMITS:
        cut_metrics, cut_scores, cut_moved = await trained(replay, limit)
        assert [part.tobytes() for part in cut_scores] == [part.tobytes() for part in scores]
        assert cut_metrics == pytest.approx(metrics, rel=1e-3, abs=1e-5, nan_ok=True)
        assert float((cut_moved - moved).norm()) < 1e-2 * float(moved.norm())
    if replay.routes == "none":
        assert "replay/replayed" not in metrics
    else:
        assert metrics["replay/replayed"] == pytest.approx(1.0 if replay.routes == "recompute" else 21 / 24)
    assert metrics["grad_norm"] > 0


def test_what_watches_a_pass_sees_every_layer_with_experts():
    class Tap:
        seen = []

        def before_attention(self, layer, q, k, attend):
            self.seen.append(("attention", layer))

        def after_layer(self, layer, hidden):
            self.seen.append(("layer", layer))
            return hidden * 0

    model = tiny_moe()
    model.tap = Tap()
    with torch.no_grad():
        hidden = states(model, episodes_of(), None)
    assert model.tap.seen == [("attention", 0), ("layer", 0), ("attention", 1), ("layer", 1)]
    assert not hidden.any(), "the next layer gets what the tap gives back"


def test_a_rank_asks_for_the_decisions_of_its_own_micro_batches_alone():
    class Second(Alone):
        def share(self, num_micro_batches):
            return range(1, num_micro_batches)

    batch = prepare_batch(
        batch_of(episodes_of(), episodes_of(7, seed=1)), Objective(GrpoConfig(), RatioConfig()), SHAPE
    )
    model = tiny_moe()
    alone, ours = with_own_decisions(model, batch, (EXPERTS,)), with_own_decisions(model, batch, (EXPERTS,), Second())
    assert ours.micro_batches[0] is batch.micro_batches[0]
    assert [set(part.replayed) for part in alone.micro_batches] == [{EXPERTS}, {EXPERTS}]
    assert torch.equal(ours.micro_batches[1].replayed[EXPERTS], alone.micro_batches[1].replayed[EXPERTS])
