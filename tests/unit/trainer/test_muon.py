"""Muon against its definition in numpy, and what it steps."""

import numpy as np
import pytest
import torch
from tests.unit.trainer.tiny import SHAPE, tiny

from everlong.trainer.config import AdamWConfig, MuonConfig
from everlong.trainer.muon import muon_direction, orthogonal
from everlong.trainer.optimizer import MasterOptimizer, block_rows


def reference(matrix, iterations=5):
    """Newton-Schulz in float64, with explicit powers."""
    wide = matrix.astype(np.float64) / np.linalg.norm(matrix)
    tall = wide.shape[0] > wide.shape[1]
    wide = wide.T if tall else wide
    for _ in range(iterations):
        wide = 3.4445 * wide - 4.7750 * (wide @ wide.T) @ wide + 2.0315 * (wide @ wide.T) @ (wide @ wide.T) @ wide
    return wide.T if tall else wide


def some(rows, columns, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32)


def test_singular_values_and_size_of_the_update_are_those_of_the_anchor():
    torch.manual_seed(0)
    matrix = torch.randn(16, 64)
    values = torch.linalg.svdvals(orthogonal(matrix, 5))
    assert values.min().item() == pytest.approx(0.684, abs=1e-3)
    assert values.max().item() == pytest.approx(1.134, abs=1e-3)
    assert muon_direction(matrix, (16,), 5).square().mean().sqrt().item() == pytest.approx(0.18235, abs=1e-4)


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (24, 24), (1, 8)], ids=str)
def test_the_iteration_is_the_one_of_the_definition(shape):
    matrix = some(*shape)
    np.testing.assert_allclose(orthogonal(torch.from_numpy(matrix), 5).numpy(), reference(matrix), atol=2e-5)


def test_the_size_of_the_gradient_is_forgotten_and_nothing_stays_nothing():
    matrix = torch.from_numpy(some(8, 12))
    torch.testing.assert_close(orthogonal(1e4 * matrix, 5), orthogonal(matrix, 5), rtol=1e-4, atol=1e-5)
    assert orthogonal(torch.zeros(8, 12), 5).abs().max() == 0


def test_a_half_precision_gradient_is_orthogonalised_in_float32():
    matrix = torch.from_numpy(some(8, 12)).bfloat16()
    np.testing.assert_allclose(orthogonal(matrix, 5).numpy(), reference(matrix.float().numpy()), atol=2e-5)


def test_fused_projections_are_orthogonalised_apart():
    parts = [torch.from_numpy(some(rows, 12, seed)) for seed, rows in enumerate((8, 4, 4))]
    got = muon_direction(torch.cat(parts), (8, 4, 4), 5)
    torch.testing.assert_close(got, torch.cat([muon_direction(part, (len(part),), 5) for part in parts]))
    assert (got - muon_direction(torch.cat(parts), (16,), 5)).abs().max() > 0.01


@pytest.mark.parametrize(
    ("name", "rows", "whole", "heads"),
    [
        ("self_attn.q_proj", 16, (16,), (4,) * 4),
        ("self_attn.qkv_proj", 32, (16, 8, 8), (4,) * 8),
        ("self_attn.o_proj", 16, (16,), (16,)),
        ("mlp.gate_up_proj", 48, (24, 24), (24, 24)),
        ("mlp.up_proj", 24, (24,), (24,)),
    ],
)
def test_a_projection_is_cut_by_what_it_fuses_or_by_its_heads(name, rows, whole, heads):
    name = f"model.layers.1.{name}.weight"
    assert block_rows(name, rows, SHAPE, per_head=False) == whole
    assert block_rows(name, rows, SHAPE, per_head=True) == heads


@pytest.mark.parametrize("rows", [(8, 4), (8, 4, 8), (16, 0)], ids=str)
def test_sizes_that_are_not_those_of_the_matrix_are_refused(rows):
    with pytest.raises(ValueError, match="do not make a matrix of 16"):
        muon_direction(torch.zeros(16, 12), rows, 5)


# The optimiser -------------------------------------------------------------------------------------------------------


def gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(weight.shape, generator=generator) for weight in model.parameters()]


@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
@pytest.mark.parametrize("per_head", [True, False], ids=["heads", "whole"])
def test_a_step_is_that_of_the_definition_for_matrices_and_adamw_for_the_rest(nesterov, per_head):
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": None}
    config = MuonConfig(**settings, momentum=0.9, nesterov=nesterov, per_head=per_head)
    model, other = tiny(), tiny()
    weights = {name: weight.detach().double().numpy() for name, weight in model.named_weights().items()}
    momenta = {name: np.zeros_like(weight) for name, weight in weights.items()}
    muon, adamw = MasterOptimizer(model, config), MasterOptimizer(other, AdamWConfig(**settings))
    for batch in range(3):
        parts = dict(zip(weights, gradients(model, batch), strict=True))
        muon.step([part.clone() for part in parts.values()], batch, 1e-2)
        adamw.step([part.clone() for part in parts.values()], batch, 1e-2)
        for name, part in parts.items():
            gradient = part.double().numpy()
            momenta[name] = 0.9 * momenta[name] + gradient
            ahead = gradient + 0.9 * momenta[name] if nesterov else momenta[name]
            if name.endswith("_proj.weight"):
                headed = per_head and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
                blocks = np.split(ahead, len(ahead) // SHAPE.head_dim) if headed else [ahead]
                update = np.concatenate([0.2 * max(block.shape) ** 0.5 * reference(block) for block in blocks])
                weights[name] = weights[name] * (1 - 1e-2 * 0.1) - 1e-2 * update
    for name, weight in model.named_weights().items():
        if name.endswith("_proj.weight"):
            np.testing.assert_allclose(weight.detach().numpy(), weights[name], atol=1e-5)
        else:
            torch.testing.assert_close(weight, other.named_weights()[name], rtol=0, atol=0)


def test_a_step_moves_entries_as_far_as_the_learning_rate_says():
    model = tiny()
    before = {name: weight.detach().clone() for name, weight in model.named_weights().items()}
    MasterOptimizer(model, MuonConfig()).step(gradients(model, 0), 0, 1e-2)
    name = "model.layers.0.mlp.up_proj.weight"
    moved = (model.named_weights()[name] - before[name]).square().mean().sqrt().item()
    assert moved == pytest.approx(0.2 * 1e-2, rel=0.2)


def test_training_goes_on_bit_for_bit_from_a_saved_state():
    undisturbed = MasterOptimizer(tiny(), MuonConfig())
    for batch in range(4):
        undisturbed.step(gradients(tiny(), batch), batch, 1e-2)
    first, second = MasterOptimizer(tiny(), MuonConfig()), MasterOptimizer(tiny(), MuonConfig())
    for batch in range(2):
        first.step(gradients(tiny(), batch), batch, 1e-2)
    second.load_state({name: value.clone() for name, value in first.state().items()})
    for batch in range(2, 4):
        second.step(gradients(tiny(), batch), batch, 1e-2)
    assert all(torch.equal(value, second.state()[name]) for name, value in undisturbed.state().items())
    undisturbed.reset()
    assert all(value.abs().max() == 0 for name, value in undisturbed.state().items() if name.startswith("momentum/"))


def test_the_state_of_another_optimiser_is_refused():
    with pytest.raises(ValueError, match="another optimiser"):
        MasterOptimizer(tiny(), MuonConfig()).load_state(MasterOptimizer(tiny(), AdamWConfig()).state())


def test_stacked_experts_are_orthogonalised_each_on_its_own():
    stack = torch.stack([torch.from_numpy(some(8, 12, seed)) for seed in range(3)])
    got = muon_direction(stack, (4, 4), 5)
    for expert, direction in zip(stack, got, strict=True):
        torch.testing.assert_close(direction, muon_direction(expert, (4, 4), 5))
