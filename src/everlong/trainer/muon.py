"""Muon: the momentum of a matrix, brought to the nearest orthogonal one, as its update

M <- mu M + G;   U = G + mu M (Nesterov) or M;   W <- W - lr (0.2 sqrt(max(rows, columns)) orthogonal(U) + decay W)

An orthogonal matrix has entries of root mean square 1/sqrt(max(rows, columns)), so an entry moves by about 0.2 lr, as with
AdamW, and one learning rate serves both. Jordan 2024; scale and decay: Liu et al. 2025 (arXiv:2502.16982). In float32
throughout: the iteration can explode in bfloat16 (arXiv:2602.10604).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from everlong.trainer.optimizer_config import MuonConfig

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: they bring every singular value near 1 fast, to about 0.7 to 1.15, and no nearer."""
RMS = 0.2
"""Root mean square of an entry's update, in learning rates."""


def orthogonal(matrix_RC: Tensor, iterations: int) -> Tensor:
    """Near U V^T of the matrix's singular value decomposition, float32 [R, C]; zeros stay zeros.

    Of a stack of matrices, [..., R, C], each is one of its own.
    """
    wide = matrix_RC.float()
    wide = wide / (torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True) + 1e-7)
    tall = wide.shape[-2] > wide.shape[-1]
    wide = wide.mT if tall else wide
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(iterations):
        gram = wide @ wide.mT
        wide = linear * wide + (cubic * gram + quintic * gram @ gram) @ wide
    return wide.mT if tall else wide


def muon_direction(matrix_RC: Tensor, block_rows: Sequence[int], iterations: int) -> Tensor:
    """Orthogonalised and scaled, each block of rows apart: projections fused into one matrix are not one map.

    `block_rows` are the blocks' sizes from the top. Stacked matrices (experts), [..., R, C], are cut alike and never mixed.
    Raises ValueError unless the sizes add up to the rows.
    """
    rows = matrix_RC.shape[-2]
    if sum(block_rows) != rows or min(block_rows) < 1:
        raise ValueError(
            f"blocks of {list(block_rows)} rows do not make a matrix of {rows}: name the size of every projection "
            "that is fused into it"
        )
    blocks = matrix_RC.split(list(block_rows), dim=-2)
    scaled = [RMS * max(block.shape[-2:]) ** 0.5 * orthogonal(block, iterations) for block in blocks]
    return torch.cat(scaled, dim=-2)


@torch.no_grad()
def muon_step(
    master_RC: Tensor,
    momentum_RC: Tensor,
    gradient_RC: Tensor,
    block_rows: Sequence[int],
    rate: float,
    config: MuonConfig,
) -> None:
    """Changes the master and its momentum in place."""
    momentum_RC.mul_(config.momentum).add_(gradient_RC)
    ahead = gradient_RC + config.momentum * momentum_RC if config.nesterov else momentum_RC
    direction = muon_direction(ahead, block_rows, config.iterations)
    master_RC.mul_(1 - rate * config.weight_decay).sub_(rate * direction)
