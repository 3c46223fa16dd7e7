"""Routes in training: from the record to the pass, their gradient, and what is refused."""

import asyncio

import numpy as np
import pytest
import torch
from tests.unit.trainer.test_batch_gradient import grpo_term, reference_norm, reference_rotate
from tests.unit.trainer.tiny import moe_shape, tiny, tiny_moe

from everlong.contracts.decisions import Decisions
from everlong.contracts.records import EpisodeShare, MicroBatch, ScoreRequest, Segment, TrainBatch
from everlong.contracts.tokens import TokenColumns
from everlong.models.adapter_config import LoraConfig
from everlong.models.decisions import TokenRecorder
from everlong.models.moe.config import EXPERT_WEIGHTS, EXPERTS
from everlong.models.numerics import Numerics
from everlong.models.tree_pass import read_states
from everlong.storage import open_store
from everlong.trainer.config import (
    AdamWConfig,
    CriticConfig,
    GrpoConfig,
    GspoTokenConfig,
    KlLoss,
    MuonConfig,
    RatioConfig,
    ReinforceConfig,
    ReplayConfig,
    SapoConfig,
    TrainerConfig,
    check_replay,
)
from everlong.trainer.decided import replayed_rows
from everlong.trainer.kl_config import WITHOUT_KL
from everlong.trainer.objective import Objective
from everlong.trainer.preparation import prepare_batch
from everlong.trainer.replay import predecessors
from everlong.trainer.replay_config import WITHOUT_REPLAY
from everlong.trainer.scoring import score_micro_batch
from everlong.trainer.step import batch_gradient, with_own_decisions
from everlong.trainer.tally import Tally
from everlong.trainer.trainer import PolicyTrainer
from everlong.weights import WeightPublisher

SHAPE = moe_shape()
ROLLOUT = ReplayConfig(routes="rollout")
TREE = [(-1, -1, 3), (0, 0, 2), (1, 0, 3), (1, 0, 2), (0, 1, 4)]
"""A prompt of 3; an episode of 2 tokens that forks into 3 and 2; another of 4."""
IDS = [3, 9, 2, 2, 3, 4, 8, 5, 5, 6, 7, 1, 10, 4]


def micro_batch_of(decisions=None, logprobs=None, *, version=0):
    segments, at = [], 0
    for number, (parent, episode, length) in enumerate(TREE):
        branch = int(number == 3)
        segments.append(Segment(parent=parent, start=at, length=length, episode=episode, branch=branch))
        at += length
    sampled = TokenColumns.sampled_tokens(
        IDS[3:], np.full(11, -1.5, np.float32) if logprobs is None else logprobs, version=version
    )
    credit = np.float32([0.8] * 7 + [-1.1] * 4)
    columns = TokenColumns.context(IDS[:3]) + sampled.replace(credit=credit)
    if decisions is not None:
        columns = columns.replace(decisions=decisions)
    return MicroBatch(columns=columns, segments=tuple(segments))


def batch_of(micro_batch, batch=0):
    shares = tuple(EpisodeShare(episode=f"e{i}", group=0, num_trainable=n) for i, n in enumerate((7, 4)))
    return TrainBatch(batch=batch, micro_batches=(micro_batch,), episodes=shares)


BEFORE = predecessors(micro_batch_of().segments, 14)


def recorded(**rows):
    """Decisions as an engine records them: at each token the row of the one before it on its path."""
    moved = {}
    for name, of_pass in rows.items():
        column = np.full_like(of_pass, np.nan if of_pass.dtype == np.float32 else 255)
        column[BEFORE >= 0] = of_pass[BEFORE[BEFORE >= 0]]
        moved[name] = column
    return Decisions(num_tokens=14, rows=moved)


def random_routes(seed=0):
    """Of every pass, [14, 2, 2], other than what a router would choose."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((14, 2, 4)), axis=-1)[..., :2].astype(np.uint8)


def decided_by(model):
    recorder = TokenRecorder()
    with torch.no_grad():
        read_states(model, (), micro_batch_of(), np.arange(14), lambda hidden, _: (hidden,), recorder)
    rows = recorder.rows()
    return {EXPERTS: rows[EXPERTS].numpy().astype(np.uint8), EXPERT_WEIGHTS: rows[EXPERT_WEIGHTS].numpy()}


def trainer_of(
    model, replay=WITHOUT_REPLAY, *, loss=None, updates=1, ratio=None, kl=WITHOUT_KL, critic=None, optimizer=None
):
    store = open_store("memory://")
    return PolicyTrainer(
        model, config=TrainerConfig(updates_per_batch=updates), loss=loss or GrpoConfig(), ratio=ratio or RatioConfig(),
        optimizer=optimizer or AdamWConfig(learning_rate=1e-2), numerics=model.numerics, store=store, kl=kl, critic=critic, replay=replay,
        publisher=WeightPublisher(store, 10), seed=0, lease=asyncio.Lock(),
    )  # fmt: skip


# From the record to the pass -----------------------------------------------------------------------------------------


def test_a_row_goes_back_to_the_token_that_it_was_computed_for():
    routes = random_routes()
    rows = replayed_rows(0, micro_batch_of(recorded(experts=routes)), SHAPE, (EXPERTS,))[EXPERTS]
    leaves = [7, 9, 13]
    others = [token for token in range(14) if token not in leaves]
    assert rows[others].tolist() == routes[others].tolist()
    assert (rows[leaves] == -1).all(), "behind the last token of a branch nothing was computed"


def test_where_branches_say_otherwise_the_first_settles_it():
    decisions = recorded(experts=random_routes())
    decisions.rows[EXPERTS][8] = [
        [0, 1],
        [0, 1],
    ]  # the second branch's first token, which token 4 predicts as it does 5
    decisions.rows[EXPERTS][5] = [[3, 2], [3, 2]]
    rows = replayed_rows(0, micro_batch_of(decisions), SHAPE, (EXPERTS,))[EXPERTS]
    assert rows[4].tolist() == [[3, 2], [3, 2]]
    decisions.rows[EXPERTS][5] = 255
    first = micro_batch_of(decisions)
    first = MicroBatch(columns=first.columns.freeze(), segments=first.segments)
    rows = replayed_rows(0, first, SHAPE, (EXPERTS,))[EXPERTS]
    assert rows[4].tolist() == [[0, 1], [0, 1]], "where the first says nothing, the next does"


def with_rows(change):
    routes = random_routes()
    decisions = recorded(experts=routes)
    change(decisions.rows)
    return micro_batch_of(decisions)


def blank(rows):
    rows[EXPERTS][6] = 255


def half(rows):
    rows[EXPERTS][6, 1] = 255


def beyond(rows):
    rows[EXPERTS][6, 1, 0] = 4


def twice(rows):
    rows[EXPERTS][6, 0] = [2, 2]


def narrow(rows):
    rows[EXPERTS] = rows[EXPERTS][:, :, :1]


def wide(rows):
    rows[EXPERTS] = rows[EXPERTS].astype(np.uint16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (blank, "sampled token 6 of micro-batch 3 has no experts on record, and 0 more"),
        (half, "experts of token 6 of micro-batch 3 are"),
        (beyond, "experts of token 6 of micro-batch 3 are .* different ones below 4"),
        (twice, "experts of token 6 of micro-batch 3 are"),
        (
            narrow,
            r"uint8\[2, 1\] per token, and the model has uint8\[2, 2\]: the episode was sampled with another model",
        ),
        (wide, r"uint16\[2, 2\] per token"),
        (dict.clear, "sampled token 3 of micro-batch 3 has no experts on record, and 10 more"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_routes_that_are_not_this_model_s_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replayed_rows(3, with_rows(change), SHAPE, (EXPERTS,))


def test_a_weight_that_is_no_number_is_refused():
    weights = np.full((14, 2, 2), 0.5, np.float32)
    weights[4, 1, 0] = np.inf
    with pytest.raises(ValueError, match="expert_weights of token 5 .* finite"):
        replayed_rows(0, micro_batch_of(recorded(expert_weights=weights)), SHAPE, (EXPERT_WEIGHTS,))


async def test_a_batch_that_is_refused_changes_nothing():
    trainer = trainer_of(tiny_moe(), ROLLOUT)
    before = (await trainer.publish()).fingerprint
    with pytest.raises(ValueError, match="no experts on record"):
        await trainer.train(batch_of(with_rows(blank)))
    assert trainer._status().fingerprint == before and trainer._status().num_batches == 0
    await trainer.train(batch_of(micro_batch_of(recorded(experts=random_routes()))))
    await trainer.close()


async def test_traces_without_a_record_are_imitated_by_the_routes_of_the_moment():
    trainer = trainer_of(tiny_moe(), ROLLOUT)
    columns = TokenColumns.context(IDS[:3]) + TokenColumns.supervised(IDS[3:])
    segments = (Segment(parent=-1, start=0, length=3, episode=-1), Segment(parent=0, start=3, length=11, episode=0))
    micro_batch = MicroBatch(columns=columns, segments=segments)
    share = EpisodeShare(episode="trace", group=-1, num_trainable=11)
    report = await trainer.train(TrainBatch(batch=0, micro_batches=(micro_batch,), episodes=(share,)))
    await trainer.close()
    assert report.metrics["replay/replayed"] == 0 and "replay/overlap" not in report.metrics
    assert report.metrics["grad_norm"] > 0


# What replay is for --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["recomputed", "recorded"])
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
async def test_replay_makes_the_log_ratio_exactly_0_at_staleness_0(router, weights):
    model = tiny_moe(Numerics.ALIGNED, router=router)
    logprobs = score_micro_batch(model, micro_batch_of(), 512)[3:]
    micro_batch = micro_batch_of(recorded(**decided_by(model)), logprobs)
    trainer = trainer_of(model, ReplayConfig(routes="rollout", weights=weights))
    scored = await trainer.score(ScoreRequest(micro_batches=(micro_batch,)))
    assert scored.logprobs[0][3:].tobytes() == logprobs.tobytes()
    metrics = (await trainer.train(batch_of(micro_batch))).metrics
    await trainer.close()
    assert metrics["mismatch/max"] == 0.0 and metrics["ratio/max"] == metrics["ratio/mean"] == 1.0
    assert metrics["replay/overlap"] == 1.0 and metrics["replay/replayed"] == 11 / 14


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
async def test_without_replay_another_choice_shows_in_the_ratio_and_with_it_does_not(router):
    """The sampler's router stood near a tie and chose otherwise: same weights, other experts."""
    model, routes = tiny_moe(Numerics.ALIGNED, router=router), random_routes()
    own = decided_by(model)[EXPERTS]
    assert (np.sort(own) != np.sort(routes)).any()
    replayed = trainer_of(model, ROLLOUT)
    asked = ScoreRequest(micro_batches=(micro_batch_of(recorded(experts=routes)),))
    logprobs = (await replayed.score(asked)).logprobs[0][3:]
    micro_batch = micro_batch_of(recorded(experts=routes), logprobs)
    free = (await trainer_of(tiny_moe(Numerics.ALIGNED, router=router)).train(batch_of(micro_batch))).metrics
    bound = (await replayed.train(batch_of(micro_batch))).metrics
    assert free["mismatch/max"] > 0.1 and "replay/overlap" not in free
    assert bound["mismatch/max"] == 0.0 and 0 < bound["replay/overlap"] < 1


def reference_hidden(weights, ids, routes):
    """Independent, in float64, one row of tokens: dense attention, and each token's experts summed one by one."""
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
            scores = (q[:, head] @ k[:, group].T / SHAPE.head_dim**0.5).masked_fill(~causal, -torch.inf)
            heads.append(scores.softmax(-1) @ v[:, group])
        x = x + torch.cat(heads, -1) @ w["self_attn.o_proj.weight"].T
        y = reference_norm(x, w["post_attention_layernorm.weight"])
        x = x + torch.stack([reference_experts(w, token, routes[i][layer]) for i, token in enumerate(y)])
    return reference_norm(x, weights["model.norm.weight"])


def reference_experts(w, token, chosen):
    logits = w["block_sparse_moe.gate.weight"] @ token
    chosen = logits.topk(2).indices.tolist() if chosen is None else chosen
    shares = logits[chosen].softmax(-1)
    total = 0.0
    for share, expert in zip(shares, chosen, strict=True):
        w1, w2, w3 = (w[f"block_sparse_moe.experts.{expert}.w{n}.weight"] for n in (1, 2, 3))
        gate = w1 @ token
        total = total + share * (w2 @ (gate * torch.sigmoid(gate) * (w3 @ token)))
    return total


BRANCHES = [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 8, 9], [0, 1, 2, 10, 11, 12, 13]]


@pytest.mark.parametrize("replay", [True, False], ids=["replayed", "by its own routers"])
def test_the_gradient_is_that_of_an_independent_float64_reference(replay):
    """Three rows instead of one tree, routes given per token: so the tree's record lands where it belongs."""
    model, routes = tiny_moe(), random_routes()
    micro_batch = micro_batch_of(recorded(experts=routes))
    objective = Objective(GrpoConfig(), RatioConfig())
    prepared = prepare_batch(batch_of(micro_batch), objective, SHAPE, (EXPERTS,) if replay else ())
    got = batch_gradient(model, prepared, objective, None, 512, Tally())

    weights = {n: w.detach().double().requires_grad_() for n, w in model.named_weights().items()}
    leaves, columns, trained = {7, 9, 13}, micro_batch.columns, set()
    total = torch.zeros((), dtype=torch.float64)
    for tokens in BRANCHES:
        chosen = [[None] * 2 if not replay or t in leaves else routes[t].tolist() for t in tokens]
        hidden = reference_hidden(weights, torch.tensor([IDS[t] for t in tokens]), chosen)
        logits = (hidden @ weights["model.embed_tokens.weight"].T)[:, : SHAPE.vocab_size]
        for place, token in enumerate(tokens[1:]):
            if columns.sampled[token] and token not in trained:
                logprob = logits[place].log_softmax(-1)[IDS[token]]
                total = total + grpo_term(logprob, columns, token)
                trained.add(token)
    expected = torch.autograd.grad(total / 11, list(weights.values()), allow_unused=True)
    assert got.loss == pytest.approx(float(total.detach()) / 11, rel=1e-5)
    for (name, weight), mine, theirs in zip(weights.items(), got.gradient, expected, strict=True):
        theirs = torch.zeros_like(weight) if theirs is None else theirs
        torch.testing.assert_close(
            mine.double(), theirs, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
    routers = [part for name, part in zip(weights, got.gradient, strict=True) if name.endswith("gate.weight")]
    assert len(routers) == 2 and all(part.abs().max() > 1e-4 for part in routers), "routers learn"


# By its own first pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["recomputed", "recorded"])
async def test_the_routes_of_the_first_update_hold_for_the_others(weights):
    """They are no sampler's: nothing need be on record."""
    model = tiny_moe(Numerics.ALIGNED)
    own, replay = decided_by(model), ReplayConfig(routes="recompute", weights=weights)
    trainer = trainer_of(model, replay, updates=3, ratio=RatioConfig(base="proximal"))
    seen = []
    plain = trainer._optimizer.step
    trainer._optimizer.step = lambda *args: (seen.append(decided_by(model)[EXPERTS]), plain(*args))[1]
    metrics = (await trainer.train(batch_of(micro_batch_of()))).metrics
    await trainer.close()
    assert seen[0].tolist() == own[EXPERTS].tolist() and metrics["replay/replayed"] == 1.0
    assert seen[2].tolist() != own[EXPERTS].tolist(), "the routers' own choice has moved on"
    assert metrics["replay/overlap"] < 1.0


def test_the_first_update_by_its_own_routes_is_the_one_without_replay():
    model = tiny_moe(Numerics.ALIGNED)
    objective = Objective(ReinforceConfig(), RatioConfig())
    prepared = prepare_batch(batch_of(micro_batch_of()), objective, SHAPE)
    for names in ((EXPERTS,), (EXPERTS, EXPERT_WEIGHTS)):
        own = with_own_decisions(model, prepared, names)
        assert own.micro_batches[0].replayed.keys() == set(names)
        first, free = (batch_gradient(model, b, objective, None, 512, Tally()) for b in (own, prepared))
        assert first.loss == free.loss
        for mine, other in zip(first.gradient, free.gradient, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)


async def test_the_reference_is_asked_by_the_same_routes():
    """At the policy's own weights it says the same of every token, so that the KL is 0 and stays a matter of weights alone."""
    for replay, routes in ((ROLLOUT, random_routes()), (ReplayConfig(routes="recompute"), None)):
        micro_batch = micro_batch_of(None if routes is None else recorded(experts=routes))
        trainer = trainer_of(tiny_moe(Numerics.ALIGNED), replay, kl=KlLoss(coefficient=0.5))
        assert (await trainer.train(batch_of(micro_batch))).metrics["kl"] == 0.0
        assert (await trainer.train(batch_of(micro_batch, batch=1))).metrics["kl"] > 0.0
        await trainer.close()


async def test_a_critic_routes_by_itself():
    routes = random_routes()
    micro_batch = micro_batch_of(recorded(experts=routes))
    columns = micro_batch.columns.replace(returns=np.where(micro_batch.columns.sampled, 0.5, np.nan).astype(np.float32))
    trainer = trainer_of(tiny_moe(), ROLLOUT, critic=CriticConfig())
    metrics = (await trainer.train(batch_of(MicroBatch(columns=columns, segments=micro_batch.segments)))).metrics
    await trainer.close()
    assert metrics["critic/grad_norm"] > 0 and metrics["replay/replayed"] == 11 / 14


@pytest.mark.parametrize("adapter", [None, LoraConfig(rank=2, targets=("q_proj", "v_proj"))], ids=["whole", "lora"])
@pytest.mark.parametrize(
    "loss", [ReinforceConfig(), GspoTokenConfig(clip_low=0.9, clip_high=90.0), SapoConfig()], ids=lambda loss: loss.type
)
async def test_losses_train_whole_networks_and_adapters_on_replayed_routes(loss, adapter):
    model = tiny_moe()
    if adapter is not None:
        model.adapt(adapter)
    before = {name: weight.detach().clone() for name, weight in model.trained_weights().items()}
    trainer = trainer_of(model, ROLLOUT, loss=loss)
    metrics = (await trainer.train(batch_of(micro_batch_of(recorded(experts=random_routes()))))).metrics
    await trainer.close()
    assert 0 < metrics["grad_norm"] < 1e6
    moved = {name for name, weight in model.trained_weights().items() if not torch.equal(weight, before[name])}
    assert {name for name in before if "gate.weight" in name or "lora_B" in name} <= moved


async def test_muon_takes_each_expert_s_matrix_by_itself():
    model = tiny_moe()
    before = {name: weight.detach().clone() for name, weight in model.named_weights().items()}
    trainer = trainer_of(model, ROLLOUT, optimizer=MuonConfig(learning_rate=1e-2, weight_decay=0.0))
    await trainer.train(batch_of(micro_batch_of(recorded(experts=random_routes()))))
    await trainer.close()
    for name in ("experts.0.w1", "experts.1.w2", "experts.3.w3"):
        name = f"model.layers.0.block_sparse_moe.{name}.weight"
        moved = model.named_weights()[name].detach() - before[name]
        highest = float(torch.linalg.svdvals(moved)[0])
        assert highest == pytest.approx(0.2 * 1e-2 * 16**0.5, rel=0.35), "as an orthogonal matrix of its own shape"


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routes", ["rollout", "recompute"])
def test_a_model_without_routers_has_no_routes_to_replay(routes):
    with pytest.raises(
        ValueError, match=f"replay.routes={routes} needs a model with routers, and the network has none"
    ):
        trainer_of(tiny(), ReplayConfig(routes=routes), updates=2)


def test_replaying_the_first_pass_needs_a_second_one():
    with pytest.raises(ValueError, match=r"replay.routes=recompute has no effect with trainer.updates_per_batch=1"):
        check_replay(ReplayConfig(routes="recompute"), 1, WITHOUT_KL)
    check_replay(ReplayConfig(routes="recompute"), 2, WITHOUT_KL)
    check_replay(ReplayConfig(routes="recompute"), 1, KlLoss())
    check_replay(ReplayConfig(routes="rollout"), 1, WITHOUT_KL)
