"""The family with experts: routing against numbers worked out by hand, gradients in float64, one network in all its forms."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from everlong.models.adapter_config import LoraConfig
from everlong.models.attention import TreeAttention
from everlong.models.checkpoint import load_checkpoint, save_checkpoint
from everlong.models.config import ToyMoeModel
from everlong.models.decisions import Recorder, Replay, as_chosen
from everlong.models.families import read_shape
from everlong.models.llama.config import LlamaConfig
from everlong.models.moe.config import EXPERT_WEIGHTS, EXPERTS, MoeConfig
from everlong.models.moe.routing import choose, gate_weights, mix, route
from everlong.models.networks import empty_network, packed_network
from everlong.models.numerics import Numerics
from everlong.models.source import find_model, toy_moe_config
from everlong.models.toy import random_llama

SMALL = {
    "vocab_size": 20, "padded_vocab_size": 24, "hidden_size": 16, "intermediate_size": 12, "num_layers": 2, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 4, "max_positions": 77,
}  # fmt: skip


def shape_of(router="softmax", normalised=True, **changes):
    return MoeConfig(**{**SMALL, "num_experts": 4, "router": router, "normalised": normalised, **changes})


def small(**changes):
    """Far from uniform, so that an error would show."""
    model = random_llama(shape_of(**changes), 3)
    with torch.no_grad():
        for name, weight in model.named_weights().items():
            if "norm" not in name:
                weight.mul_(20)
    return model


def hidden_of(network, model, ids, decide=as_chosen):
    attend = TreeAttention([(-1, 0, len(ids))], model.config.head_dim**-0.5, model.numerics)
    return network(ids, torch.arange(len(ids)), attend, decide)


IDS = torch.randint(0, 20, (40,), generator=torch.Generator().manual_seed(0))


# What a router says --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("logits", "chosen", "router", "normalised", "expected"),
    [
        pytest.param([2, 1, 0, -1], [0, 2], "softmax", True, [0.880797, 0.119203], id="recorded, softmax"),
        pytest.param([2, 1, 0, -1], [0, 1], "softmax", True, [0.731059, 0.268941], id="own choice, softmax"),
        pytest.param([2, 1, 0, -1], [0, 2], "sigmoid", True, [0.637890, 0.362110], id="recorded, sigmoid"),
        pytest.param([2, 1, 0], [1], "softmax", False, [0.244728], id="one that is not the best, softmax over all"),
        pytest.param([2, 1, 0], [1], "sigmoid", False, [0.731059], id="one that is not the best, sigmoid"),
        pytest.param([2, 1, 0], [1, 2], "softmax", True, [0.731059, 0.268941], id="two without the best"),
        pytest.param([2, 1, 0, -1], [2, 0], "softmax", True, [0.119203, 0.880797], id="in the order of the record"),
    ],
)
def test_weights_are_of_the_present_logits_at_the_chosen_experts(logits, chosen, router, normalised, expected):
    logits = torch.tensor([logits], dtype=torch.float64, requires_grad=True)
    config = shape_of(router, normalised, experts_per_token=2 if normalised else 1)
    weights = gate_weights(logits, torch.tensor([chosen]), config, Numerics.FAST)
    assert weights[0].tolist() == pytest.approx(expected, abs=1e-6)
    (gradient,) = torch.autograd.grad(weights[0, 0], logits)
    assert gradient[0, chosen[0]] > 0.01, "the router of a recorded choice learns"
    if normalised or router == "sigmoid":
        others = [expert for expert in range(logits.shape[1]) if expert not in chosen]
        assert (gradient[0, others] == 0).all()


def test_the_best_are_chosen_and_of_equals_the_lower_number():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-1.0, 0.0, -3.0, 0.5]])
    assert choose(logits, 2).tolist() == [[1, 2], [0, 1], [3, 1]]
    many = torch.zeros(64, 200)
    assert choose(many, 8).tolist() == [list(range(8))] * 64


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_gradient_flows_through_weights_and_never_through_the_choice(router, normalised):
    """In float64, against differences, where the record is not what the router would choose."""
    torch.manual_seed(0)
    x = torch.randn(5, 6, dtype=torch.float64)
    router_weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(4, 6, 6, dtype=torch.float64)
    recorded = torch.tensor([[3, 1], [0, 2], [1, 0], [2, 3], [3, 0]])
    config = shape_of(router, normalised)

    def out(weight):
        decide = Replay({EXPERTS: recorded[:, None]})
        chosen, weights = route(x @ weight.T, config, 0, decide, Numerics.FAST)
        assert torch.equal(chosen, recorded)
        return mix(x, chosen, weights, lambda number, rows: rows @ matrices[number])

    assert torch.autograd.gradcheck(out, router_weight)
    (gradient,) = torch.autograd.grad(out(router_weight).square().sum(), router_weight)
    assert gradient.abs().max() > 0.1
    assert (recorded != choose(x @ router_weight.T, 2)).any()


def test_recorded_weights_are_used_to_the_bit_while_the_router_keeps_its_own_gradient():
    torch.manual_seed(1)
    logits = torch.randn(6, 4, requires_grad=True)
    recorded, weights = torch.tensor([[0, 3]] * 6), torch.rand(6, 1, 2)
    weights[2] = torch.nan
    own = gate_weights(logits, recorded, shape_of(), Numerics.FAST)
    replay = Replay({EXPERTS: recorded[:, None], EXPERT_WEIGHTS: weights})
    _, used = route(logits, shape_of(), 0, replay, Numerics.FAST)
    there = torch.arange(6) != 2
    assert torch.equal(used[there], weights[there, 0]) and torch.equal(used[2], own[2])
    push = torch.randn(6, 2)
    gradients = [torch.autograd.grad((w * push).sum(), logits, retain_graph=True)[0] for w in (used, own)]
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_what_is_not_on_record_stays_the_network_s_own_choice_and_shares_are_counted():
    own, recorded = torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.tensor([[1, 0], [-1, -1], [1, 2]])
    replay = Replay({EXPERTS: recorded[:, None]})
    assert replay(EXPERTS, 0, own).tolist() == [[1, 0], [2, 3], [1, 2]]
    shares = replay.shares()
    assert shares["replayed"].tolist() == [True, False, True]
    assert shares["overlap"].float().mean() == 0.75, "whatever their order"
    assert torch.equal(Replay({})(EXPERTS, 0, own), own) and Replay({}).shares() == {}


def test_scores_that_underflow_give_no_nan():
    logits = torch.full((2, 4), -200.0, requires_grad=True)
    weights = gate_weights(logits, torch.tensor([[0, 1], [2, 3]]), shape_of("sigmoid"), Numerics.FAST)
    (gradient,) = torch.autograd.grad(weights.sum(), logits)
    assert weights.isfinite().all() and gradient.isfinite().all()


# The sum over experts ------------------------------------------------------------------------------------------------


def test_the_mixture_is_the_sum_that_the_formula_says():
    torch.manual_seed(0)
    x, matrices = torch.randn(9, 6, dtype=torch.float64), torch.randn(4, 6, 6, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(9)])  # the last expert is nobody's
    weights = torch.rand(9, 2, dtype=torch.float64)
    asked = []

    def expert(number, rows):
        asked.append(number)
        return rows @ matrices[number]

    got = mix(x, chosen, weights, expert)
    for token in range(9):
        parts = [weights[token, k] * (x[token] @ matrices[chosen[token, k]]) for k in range(2)]
        torch.testing.assert_close(got[token], parts[0] + parts[1])
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_the_network_is_the_one_that_a_plain_float64_reference_computes(router):
    model = small(router=router)
    weights = {name: weight.detach().double() for name, weight in model.named_weights().items()}
    x, prefix = torch.randn(7, 16, dtype=torch.float64), "model.layers.1.block_sparse_moe."
    logits = x @ weights[f"{prefix}gate.weight"].T
    expected = torch.zeros(7, 16, dtype=torch.float64)
    for token in range(7):
        best = logits[token].topk(2).indices
        scores = logits[token, best].exp() if router == "softmax" else torch.sigmoid(logits[token, best])
        for expert, score in zip(best.tolist(), scores / scores.sum(), strict=True):
            w1, w2, w3 = (weights[f"{prefix}experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
            expected[token] += score * (w2 @ (F.silu(w1 @ x[token]) * (w3 @ x[token])))
    own = [weight for name, weight in model.named_weights().items() if name.startswith(prefix)]
    with torch.no_grad():
        got = model._mlp(1, x.float(), own, as_chosen)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_replaying_its_own_record_changes_no_bit(router):
    for numerics in Numerics:
        model = random_llama(shape_of(router), 3, numerics=numerics)
        recorder = Recorder()
        with torch.no_grad():
            plain = hidden_of(model, model, IDS, recorder)
            rows = recorder.rows()
            assert rows[EXPERTS].shape == rows[EXPERT_WEIGHTS].shape == (40, 2, 2)
            assert torch.equal(hidden_of(model, model, IDS, Replay({EXPERTS: rows[EXPERTS]})), plain)
            assert torch.equal(hidden_of(model, model, IDS, Replay(rows)), plain)
            other = Replay({EXPERTS: (rows[EXPERTS] + 1) % 4})
            assert (hidden_of(model, model, IDS, other) - plain).abs().max() > 1e-4


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_a_token_s_bits_depend_on_no_neighbour_in_aligned_numerics(router):
    model = random_llama(shape_of(router), 3, numerics=Numerics.ALIGNED)
    x = torch.randn(70, 16, generator=torch.Generator().manual_seed(0))
    own = [weight for name, weight in model.named_weights().items() if "layers.0.block_sparse_moe" in name]
    with torch.no_grad():
        whole = model._mlp(0, x, own, as_chosen)
        for first, count in ((0, 1), (5, 2), (11, 17), (0, 64)):
            part = model._mlp(0, x[first : first + count], own, as_chosen)
            assert torch.equal(part, whole[first : first + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_packed_for_sampling_it_computes_the_same(router, dtype):
    model = empty_network(shape_of(router), dtype)
    model.load_weights(
        {name: weight.detach().to(dtype) for name, weight in small(router=router).named_weights().items()}
    )
    packed, recorder = packed_network(model), Recorder()
    packed.pack()
    with torch.no_grad():
        expected = hidden_of(model, model, IDS, recorder)
        got = hidden_of(packed, model, IDS, Replay({EXPERTS: recorder.rows()[EXPERTS]}))
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


# Shape, names, files -------------------------------------------------------------------------------------------------


def test_the_toy_with_experts_has_two_million_parameters_and_one_seed():
    shape = find_model(ToyMoeModel()).shape
    assert shape == toy_moe_config(ToyMoeModel())
    ours, again, other = (random_llama(shape, seed).named_weights() for seed in (3, 3, 4))
    assert sum(weight.numel() for weight in ours.values()) == 1_958_528
    assert all(torch.equal(weight, again[name]) for name, weight in ours.items())
    assert not torch.equal(ours["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert {name: tuple(s) for name, s in shape.decisions.items()} == {EXPERTS: (6, 2, 8), EXPERT_WEIGHTS: (6, 2, None)}


@pytest.mark.parametrize(("router", "normalised"), [("softmax", True), ("softmax", False), ("sigmoid", True)])
def test_a_checkpoint_comes_back_as_the_same_network(tmp_path, router, normalised):
    model = small(router=router, normalised=normalised)
    save_checkpoint(model, tmp_path / "saved")
    said = json.loads((tmp_path / "saved" / "config.json").read_text())
    # what transformers would compute otherwise bears no name that it knows
    assert (said["model_type"] == "mixtral") == (router == "softmax" and normalised)
    loaded = load_checkpoint(tmp_path / "saved")
    assert loaded.config == model.config == read_shape(said)
    with torch.no_grad():
        assert torch.equal(hidden_of(loaded, loaded, IDS), hidden_of(model, model, IDS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts_per_token": 0}, "0 of 4 experts"),
        ({"experts_per_token": 5}, "5 of 4 experts"),
        ({"experts_per_token": 1}, "weight 1 whatever its router says"),
    ],
)
def test_a_shape_that_could_not_route_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        shape_of(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"model_type": "qwen3_moe"}, "model_type 'qwen3_moe'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_what_the_family_does_not_honour_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        read_shape({**shape_of().to_hf(), **change})


def test_a_llama_decides_nothing_and_stays_a_llama():
    dense = LlamaConfig(**SMALL)
    assert dense.decisions == {} and type(empty_network(dense)).__name__ == "Llama"
    assert read_shape(dense.to_hf()) == dense


def test_adapters_are_those_of_attention():
    with pytest.raises(ValueError, match=r"gate_proj, up_proj, down_proj, .* once per expert"):
        small().adapt(LoraConfig())
    model, plain = small(), small()
    model.adapt(LoraConfig(rank=2, targets=("q_proj", "o_proj")))
    with torch.no_grad():
        assert torch.equal(hidden_of(model, model, IDS), hidden_of(plain, plain, IDS))
        for name, weight in model.trained_weights().items():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)
        packed, recorder = packed_network(model), Recorder()
        packed.pack()
        taught = hidden_of(model, model, IDS, recorder)
        assert (taught - hidden_of(plain, plain, IDS)).abs().max() > 0.01
        replay = Replay({EXPERTS: recorder.rows()[EXPERTS]})
        torch.testing.assert_close(hidden_of(packed, model, IDS, replay), taught, rtol=1e-4, atol=1e-4)


def test_the_same_weights_loaded_twice_give_the_same_outputs():
    model = small()
    weights = {name: weight.detach().clone() for name, weight in model.named_weights().items()}
    with torch.no_grad():
        once = hidden_of(model, model, IDS)
        model.load_weights(weights)
        assert torch.equal(hidden_of(model, model, IDS), once)


def test_an_expert_that_no_token_chose_has_no_gradient_and_every_other_has():
    model = small()
    recorded = torch.from_numpy(np.tile(np.int64([0, 2]), (40, 2, 1)))
    weights = model.named_weights()
    hidden = hidden_of(model, model, IDS, Replay({EXPERTS: recorded}))
    gradients = torch.autograd.grad(hidden.square().sum(), list(weights.values()), allow_unused=True)
    for name, gradient in zip(weights, gradients, strict=True):
        idle = ".experts.1." in name or ".experts.3." in name
        assert (gradient is None) == idle, name
        assert idle or gradient.abs().max() > 0, name
