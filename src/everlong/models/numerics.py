"""Numerics modes and the operations whose bits do not depend on what else is in the batch.

A sum's bits depend on its order, and libraries choose the order by the shape of the call. In `aligned` numerics every
reduction therefore has a shape of its own that no neighbour can change: rows of a product are padded to tiles of
`ROW_TILE` (He et al. 2025, "Defeating nondeterminism in LLM inference"), attention runs over key tiles of `KEY_TILE`
at absolute positions with an online softmax, and the arithmetic is float32. `self_test` shows on this machine, before
a run starts, that it holds; nothing is decided by the vendor's name.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor

# T tokens, B sequences, Q queries per sequence, S keys, H query heads, G key-value heads, D head width, K inner width,
# R queries of all query heads that share a key head

ROW_TILE = 16
"""Rows of a product are padded to a multiple of this. Few rows take other kernels (fewer than 12 have been seen to)."""
QUERY_TILE = 16
KEY_TILE = 64
VECTOR = 64
"""Elements that a vector loop takes at once, at most."""
PIECE = 32768
"""Elements below which an elementwise operation stays on one thread."""


class Numerics(StrEnum):
    FAST = "fast"
    ALIGNED = "aligned"


class NumericsUnavailable(ValueError):
    """This machine cannot make aligned numerics bit for bit."""


def widened(x: Tensor) -> Tensor:
    """In float32, in which what must not be rounded is kept; what is float64 stays so."""
    return x if x.dtype is torch.float64 else x.float()


def linear(x: Tensor, weight: Tensor, numerics: Numerics) -> Tensor:
    """x[T, K] times weight[N, K] transposed. Aligned: in float32, and a row's bits depend on that row alone."""
    if numerics is Numerics.FAST:
        return F.linear(x.to(weight.dtype), weight)
    rows = x.shape[0]
    padded = F.pad(x.float(), (0, 0, 0, -rows % ROW_TILE))
    return F.linear(padded, weight.float())[:rows]


def steady(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function whose bits at one place do not depend on the size of x or the number of threads.

    Vector loops leave a rest to scalar code, whose exponential differs in the last bit; and threads cut a long array
    anywhere. So the array is padded to whole vectors and worked in pieces that one thread takes.
    """
    flat = F.pad(x.flatten(), (0, -x.numel() % VECTOR))
    pieces = [function(piece) for piece in flat.split(PIECE)]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[: x.numel()].view_as(x)


def silu(x: Tensor, numerics: Numerics) -> Tensor:
    return steady(F.silu, x) if numerics is Numerics.ALIGNED else F.silu(x)


def tiled_attention(q_BQHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, q_positions_BQ: Tensor, scale: float) -> Tensor:
    """Causal attention in fixed tiles: keys stand at positions 0..S-1, a query at position p sees keys up to p.

    A query's bits depend on its own keys alone: not on its place among the queries, on B, Q or S, nor on what stands
    behind position p. Differentiable. Returns [B, Q, H, D] in float32.
    """
    return tiled_attention_with_mass(q_BQHD, k_BSGD, v_BSGD, q_positions_BQ, scale)[0]


def tiled_attention_with_mass(
    q_BQHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, q_positions_BQ: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The same, and of each query the logarithm of the sum of its exponentials, [B, Q, H]."""
    batch, num_queries, heads, width = q_BQHD.shape
    groups = k_BSGD.shape[2]
    repeats = heads // groups
    tiles = -(-num_queries // QUERY_TILE)
    pad_q, pad_s = tiles * QUERY_TILE - num_queries, -k_BSGD.shape[1] % KEY_TILE
    q = F.pad(q_BQHD.float(), (0, 0, 0, 0, 0, pad_q)) * scale
    # one product per (sequence, query tile, key head): rows are the tile's queries of all query heads of that key head
    q = q.view(batch, tiles, QUERY_TILE, groups, repeats, width).permute(0, 1, 3, 4, 2, 5)
    q = q.reshape(batch * tiles * groups, repeats * QUERY_TILE, width)
    positions = F.pad(q_positions_BQ, (0, pad_q)).view(batch, tiles, 1, 1, QUERY_TILE)
    positions = positions.expand(batch, tiles, groups, repeats, QUERY_TILE).reshape(len(q), -1, 1)
    keys = F.pad(k_BSGD.float(), (0, 0, 0, 0, 0, pad_s)).transpose(1, 2)
    values = F.pad(v_BSGD.float(), (0, 0, 0, 0, 0, pad_s)).transpose(1, 2)

    highest = q.new_full((*q.shape[:2], 1), -torch.inf)
    total, out = q.new_zeros(*q.shape[:2], 1), torch.zeros_like(q)
    for start in range(0, keys.shape[2], KEY_TILE):
        key, value = (
            t[:, None, :, start : start + KEY_TILE].expand(-1, tiles, -1, -1, -1).reshape(len(q), KEY_TILE, width)
            for t in (keys, values)
        )
        scores = torch.bmm(q, key.transpose(1, 2))
        ahead = torch.arange(start, start + KEY_TILE, device=q.device) > positions
        scores = scores.masked_fill(ahead, -torch.inf)
        new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
        shrink, weights = steady(torch.exp, highest - new_highest), steady(torch.exp, scores - new_highest)
        total = total * shrink + weights.sum(-1, keepdim=True)
        out = out * shrink + torch.bmm(weights, value)
        highest = new_highest

    def by_query(x: Tensor) -> Tensor:
        x = x.view(batch, tiles, groups, repeats, QUERY_TILE, -1).permute(0, 1, 4, 2, 3, 5)
        return x.reshape(batch, tiles * QUERY_TILE, heads, -1)[:, :num_queries]

    return by_query(out / total), by_query(highest + total.log())[..., 0]


def causal_mask(q_positions_BQ: Tensor, num_keys: int, query_heads_per_key_head: int, dtype: torch.dtype) -> Tensor:
    """What `plain_attention` adds to its scores, [B, 1, Q * heads, S]: 0 up to the query's position, -inf behind it."""
    ahead = torch.arange(num_keys, device=q_positions_BQ.device) > q_positions_BQ[..., None]
    mask = torch.zeros(ahead.shape, dtype=dtype, device=ahead.device).masked_fill_(ahead, -torch.inf)
    return mask.repeat_interleave(query_heads_per_key_head, dim=1)[:, None]


def plain_attention(q_BQHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask_B1RS: Tensor, scale: float) -> Tensor:
    """The same attention by torch's own kernel: fast, and its bits depend on the shape of the call.

    The query heads of one key head are rows of one call, so a key is read once for all of them: the kernel's own grouping
    reads it for each, which in bfloat16 makes a decoding step's attention four times as slow on a CPU.
    """
    batch, num_queries, heads, width = q_BQHD.shape
    groups = k_BSGD.shape[2]
    rows = num_queries * (heads // groups)
    q = q_BQHD.view(batch, num_queries, groups, -1, width).permute(0, 2, 1, 3, 4).reshape(batch, groups, rows, width)
    k, v = k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1RS, scale=scale)
    out = out.view(batch, groups, num_queries, -1, width).permute(0, 2, 1, 3, 4)
    return out.reshape(batch, num_queries, heads, width)


class CausalAttention:
    """Attention of one set of positions, the same for every layer: `tiled_attention` in aligned numerics, else the plain one."""

    def __init__(self, q_positions_BQ: Tensor, scale: float, numerics: Numerics) -> None:
        self._positions, self._scale, self._numerics = q_positions_BQ, scale, numerics
        self._mask_B1RS: Tensor | None = None

    def __call__(self, q_BQHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> Tensor:
        """[B, Q, H, D]; keys stand at positions 0..S-1, and S is the same in every call."""
        if self._numerics is Numerics.ALIGNED:
            return tiled_attention(q_BQHD, k_BSGD, v_BSGD, self._positions, self._scale)
        if self._mask_B1RS is None:
            heads_per_key_head = q_BQHD.shape[2] // k_BSGD.shape[2]
            self._mask_B1RS = causal_mask(self._positions, k_BSGD.shape[1], heads_per_key_head, q_BQHD.dtype)
        return plain_attention(q_BQHD, k_BSGD, v_BSGD, self._mask_B1RS, self._scale)


def self_test(
    hidden_size: int = 128,
    intermediate_size: int = 344,
    vocab_size: int = 264,
    head_dim: int = 32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    rank: int | None = None,
    num_experts: int | None = None,
) -> None:
    """Show on this machine that rows do not depend on their neighbours, for a model's own shapes; `rank` is of its adapters, and
    `intermediate_size` of each of its experts, where it has some.

    Holds for the number of threads it ran with. Raises NumericsUnavailable with the operation that failed.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2064, max(hidden_size, intermediate_size, num_heads * head_dim), generator=generator)
    q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
    shapes = {
        *((hidden_size, outer) for outer in (q_size, kv_size, intermediate_size, vocab_size)),
        *((inner, hidden_size) for inner in (q_size, intermediate_size)),
    }
    if num_experts is not None:
        shapes.add((hidden_size, num_experts))
    if rank is not None:
        shapes |= {(inner, rank) for inner, _ in shapes} | {(rank, outer) for _, outer in shapes}
    for inner, outer in sorted(shapes):
        weight = torch.randn(outer, inner, generator=generator)
        x = rows[: 528 if outer == vocab_size else None, :inner].contiguous()
        whole = linear(x, weight, Numerics.ALIGNED)
        for first, count in ((0, 1), (5, 2), (3, 3), (1, 8), (0, 16), (7, 17), (2, 64), (11, 256)):
            part = linear(x[first : first + count], weight, Numerics.ALIGNED)
            _require(torch.equal(part, whole[first : first + count]), f"a {inner}x{outer} product of {count} rows")
    _test_attention(head_dim, num_heads, num_kv_heads, generator)
    _test_rows(rows[:272])
    if num_experts is not None:
        _test_router(rows[:272, :num_experts].contiguous())


def _test_attention(head_dim: int, num_heads: int, num_kv_heads: int, generator: torch.Generator) -> None:
    q = torch.randn(1, 150, num_heads, head_dim, generator=generator)
    k, v = torch.randn(2, 1, 150, num_kv_heads, head_dim, generator=generator)
    positions = torch.arange(150)[None]
    whole = tiled_attention(q, k, v, positions, 0.2)
    for first, count in ((0, 1), (149, 1), (60, 9), (0, 100), (64, 64)):
        end = first + count
        part = tiled_attention(q[:, first:end], k[:, :end], v[:, :end], positions[:, first:end], 0.2)
        _require(torch.equal(part, whole[:, first:end]), f"attention of {count} queries from position {first}")
    pairs = [t.expand(5, *t.shape[1:]) for t in (q[:, 70:71], k, v, positions[:, 70:71])]
    many = tiled_attention(*pairs, 0.2)
    _require(torch.equal(many[3], whole[0, 70:71]), "attention of five sequences at once")


def _test_rows(rows: Tensor) -> None:
    for name, function in (
        ("softmax", lambda x: x.log_softmax(-1)),
        ("norm", lambda x: F.rms_norm(x, x.shape[-1:])),
        ("silu", lambda x: silu(x, Numerics.ALIGNED)),
        ("cumulative sum", lambda x: x.softmax(-1).cumsum(-1)),
    ):
        whole = function(rows)
        for first, count in ((0, 1), (5, 3), (2, 64)):
            _require(torch.equal(function(rows[first : first + count]), whole[first : first + count]), name)


def _test_router(logits: Tensor) -> None:
    for name, function in (
        ("choice of experts", lambda x: x.sort(dim=-1, descending=True, stable=True).indices),
        ("softmax over experts", lambda x: x.softmax(-1)),
        ("softmax over two experts", lambda x: x[:, :2].softmax(-1)),
        ("sigmoid of experts", lambda x: steady(torch.sigmoid, x[:, :2])),
    ):
        whole = function(logits)
        for first, count in ((0, 1), (5, 3), (2, 64)):
            _require(torch.equal(function(logits[first : first + count]), whole[first : first + count]), name)


def _require(equal: bool, what: str) -> None:
    if not equal:
        raise NumericsUnavailable(
            f"numerics=aligned needs results that do not depend on the rest of the batch, and on this machine those of "
            f"{what} do: set numerics to fast, or on an Intel CPU start with MKL_CBWR=AVX512,STRICT"
        )
