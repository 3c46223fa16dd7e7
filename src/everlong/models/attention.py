"""Attention of the trainer over packed trees: a token sees itself and what stands before it on the path to its root.

Tokens are laid out as `tree_layout` says, so that the keys a run of queries sees are a few runs of neighbours. Each pair of runs
is one call of a kernel that holds no scores; what the calls give of a token is put together by the mass of its keys, as blocks of
keys are inside of such kernels (Dao et al. 2022, arXiv:2205.14135). Backward goes through the same calls. So extra memory is a
few numbers per token, however many tokens see each other, and no key is copied.

In aligned numerics the forward pass is that of the engine: every query over its whole path in tiles at absolute positions.

A tree may be passed in parts: `KeyMemory` holds keys and values of earlier parts, and takes the gradients that later ones find.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from everlong.models.attention_logits import highest_logits
from everlong.models.numerics import Numerics, tiled_attention_with_mass, widened
from everlong.models.tree_layout import Call, Chain, Run, TreeLayout, lay_out

# N tokens of a part, T of the whole tree; B units of a call, Q queries of the longest, S keys of the longest path
# H query heads, G key-value heads, R query heads of one key head, D head width

ALIGNED_QUERIES = 512
"""Queries of one chain that attend together in aligned numerics, at most."""
ALIGNED_KEYS = 16384
"""Keys that are gathered at once in aligned numerics, unless one path has more."""


class TreeAttention:
    """An `Attend` over segments (parent index or -1, start, length) that tile the T tokens, parents first."""

    def __init__(self, segments: Sequence[tuple[int, int, int]], scale: float, numerics: Numerics) -> None:
        layout = lay_out(segments)
        self._attend = PassAttention(layout, scale, numerics)
        self._order = None if layout.is_identity else torch.from_numpy(layout.order)
        self._place = torch.from_numpy(layout.place)

    def __call__(self, layer: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        if self._order is None:
            return self._attend(layer, q_THD, k_TGD, v_TGD)
        q, k, v = (_take(x, self._order) for x in (q_THD, k_TGD, v_TGD))
        return _take(self._attend(layer, q, k, v), self._place)

    def highest_logits(self, layer: int, q_THD: Tensor, k_TGD: Tensor) -> Tensor:
        """float32 [H], over all pairs of query and key that see each other."""
        if self._order is not None:
            q_THD, k_TGD = q_THD[self._order], k_TGD[self._order]
        return self._attend.highest_logits(layer, q_THD, k_TGD)


def _take(x: Tensor, places: Tensor) -> Tensor:
    """x[places] whose gradient is summed in one order: that of an index adds atomically once threads share the work."""
    return F.embedding(places, x.flatten(1)).unflatten(-1, x.shape[1:])


class KeyMemory:
    """What later parts see of earlier ones: keys and values, layer by layer, and the sums of the gradients found for them."""

    def __init__(self, layout: TreeLayout, parts: Sequence[Run]) -> None:
        last_seen_T = np.zeros(len(layout), np.int64)
        for call in layout.calls:
            keys = last_seen_T[slice(*call.keys)]
            np.maximum(keys, call.queries[1], out=keys)
        part_end_T = np.concatenate([np.full(stop - start, stop) for start, stop in parts])
        self._seen_later_T = last_seen_T > part_end_T
        self._place = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._seen_later_T)])
        self._held: dict[int, tuple[Tensor, Tensor]] = {}
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_held(self) -> int:
        """Tokens whose keys and values are held."""
        return int(self._place[-1])

    def slot(self, run: Run) -> slice:
        """Where neighbours lie that are all held, or those of a part that are."""
        return slice(int(self._place[run[0]]), int(self._place[run[1]]))

    def write(self, layer: int, part: Run, k_NGD: Tensor, v_NGD: Tensor) -> None:
        if layer not in self._held:
            k, v = (x.new_empty(self.num_held, *x.shape[1:]) for x in (k_NGD, v_NGD))
            self._held[layer] = k, v
        for held, own in zip(self._held[layer], (k_NGD, v_NGD), strict=True):
            held[self.slot(part)] = own.detach()[self.seen_later(part)]

    def seen_later(self, part: Run) -> Tensor:
        """bool [N]: which of the part's tokens are held."""
        return torch.from_numpy(self._seen_later_T[slice(*part)])

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        return self._held[layer]

    def gradients(self, layer: int) -> tuple[Tensor, Tensor]:
        """To add to."""
        if layer not in self._gradients:
            k, v = (widened(x[:0]).new_zeros(x.shape) for x in self._held[layer])
            self._gradients[layer] = k, v
        return self._gradients[layer]


@dataclass(frozen=True, slots=True)
class _Product:
    """One call of the kernel."""

    queries: slice
    """Of the part."""
    keys: slice
    """Of the part, or of the memory where they stand before it."""
    is_before: bool
    is_causal: bool


@dataclass(frozen=True, slots=True)
class _Unit:
    """Queries of one chain and all that they see, in aligned numerics."""

    queries: slice
    """Of the part."""
    keys: tuple[tuple[bool, slice], ...]
    """The path from the root to the last query; true for what stands before the part."""
    num_keys: int

    @property
    def num_queries(self) -> int:
        return self.queries.stop - self.queries.start


class PassAttention:
    """An `Attend` over tokens in the order of a layout: all of them, or those of one part."""

    def __init__(
        self,
        layout: TreeLayout,
        scale: float,
        numerics: Numerics,
        part: Run | None = None,
        memory: KeyMemory | None = None,
        *,
        remembers: bool = False,
    ) -> None:
        """`memory` where the part is not the whole: it must hold what stands before; `remembers`: it takes the part's own."""
        self.part, self.memory, self.scale = part or (0, len(layout)), memory, scale
        self.products = tuple(_products(layout.calls, self.part, memory))
        self.units = tuple(_batches(_units(layout.chains, self.part, memory))) if numerics is Numerics.ALIGNED else ()
        self.is_aligned, self._remembers = numerics is Numerics.ALIGNED, remembers

    def __call__(self, layer: int, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
        if self._remembers and self.memory is not None:
            self.memory.write(layer, self.part, k_NGD, v_NGD)
        return _Attention.apply(q_NHD, k_NGD, v_NGD, self, layer)

    def highest_logits(self, layer: int, q_NHD: Tensor, k_NGD: Tensor) -> Tensor:
        """float32 [H], over all pairs of the part's queries and the keys that they see."""
        found = []
        for product in self.products:
            before = self.before(layer) if product.is_before else None
            keys, _ = _keys_of(product, (k_NGD, k_NGD), before)
            found.append(highest_logits(q_NHD[product.queries], keys, self.scale, is_causal=product.is_causal))
        return torch.stack(found).amax(0)

    def before(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return None if self.memory is None else self.memory.read(layer)


def _split(keys: Run, part: Run, memory: KeyMemory | None) -> Iterator[tuple[bool, slice]]:
    """A run of keys as what stands before the part, true and where it lies in memory, and what stands in the part."""
    (lowest, highest), start = keys, part[0]
    if lowest < min(highest, start):
        assert memory is not None, "a part needs the memory of what stands before it"
        yield True, memory.slot((lowest, min(highest, start)))
    if max(lowest, start) < highest:
        yield False, slice(max(lowest, start) - start, highest - start)


def _products(calls: Sequence[Call], part: Run, memory: KeyMemory | None) -> Iterator[_Product]:
    """What the calls are for the part's queries. First come those of every query over its own chain within the part."""
    start, stop = part
    clipped = [(call, max(call.queries[0], start), min(call.queries[1], stop)) for call in calls]
    clipped = [(call, first, last) for call, first, last in clipped if first < last]
    for call, first, last in clipped:
        if call.is_causal:
            own = slice(first - start, last - start)
            yield _Product(own, own, is_before=False, is_causal=True)
    for call, first, last in clipped:
        keys = (call.keys[0], first) if call.is_causal else call.keys
        for is_before, run in _split(keys, part, memory):
            yield _Product(slice(first - start, last - start), run, is_before=is_before, is_causal=False)


def _units(chains: Sequence[Chain], part: Run, memory: KeyMemory | None) -> Iterator[_Unit]:
    start, stop = part
    for chain in chains:
        for first in range(max(chain.start, start), min(chain.stop, stop), ALIGNED_QUERIES):
            last = min(first + ALIGNED_QUERIES, chain.stop, stop)
            runs = [*chain.above, (chain.start, last)]
            keys = tuple(piece for run in runs for piece in _split(run, part, memory))
            num_keys = sum(highest - lowest for lowest, highest in runs)
            yield _Unit(slice(first - start, last - start), keys, num_keys)


def _batches(units: Iterator[_Unit]) -> Iterator[list[_Unit]]:
    """Units of similar size share a call: padding at most doubles queries and keys."""
    groups: dict[tuple[int, int], list[_Unit]] = {}
    for unit in units:
        size = max(16, unit.num_queries).bit_length(), max(255, unit.num_keys).bit_length()
        groups.setdefault(size, []).append(unit)
    for size in sorted(groups):
        at_once = max(1, ALIGNED_KEYS >> size[1])
        for first in range(0, len(groups[size]), at_once):
            yield groups[size][first : first + at_once]


class _Attention(torch.autograd.Function):
    """Saves of each token what it sees with and what it has seen, [N, H, D] and [N, H], and nothing of pairs of tokens."""

    @staticmethod
    def forward(ctx, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, attend: PassAttention, layer: int) -> Tensor:
        mix = _mix_in_tiles if attend.is_aligned else _mix
        out_NHD, mass_NH = mix(q_NHD, (k_NGD, v_NGD), attend, attend.before(layer))
        out_NHD = out_NHD.to(q_NHD.dtype)
        ctx.save_for_backward(q_NHD, k_NGD, v_NGD, out_NHD, mass_NH)
        ctx.attend, ctx.layer = attend, layer
        return out_NHD

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, mass = ctx.saved_tensors
        attend, layer = ctx.attend, ctx.layer
        before = attend.before(layer)
        d_q, d_k, d_v = (torch.zeros_like(x, dtype=mass.dtype) for x in (q, k, v))
        for product in attend.products:
            keys, values = _keys_of(product, (k, v), before)
            parts = _kernel_backward(
                gradients[0][product.queries], q[product.queries], keys, values, out[product.queries],
                mass[product.queries], product.is_causal, attend.scale,
            )  # fmt: skip
            d_q[product.queries] += parts[0]
            d_keys, d_values = attend.memory.gradients(layer) if product.is_before else (d_k, d_v)
            d_keys[product.keys] += parts[1]
            d_values[product.keys] += parts[2]
        if attend.memory is not None:  # what later parts found for this one
            held, seen = attend.memory.slot(attend.part), attend.memory.seen_later(attend.part)
            for own, found in zip((d_k, d_v), attend.memory.gradients(layer), strict=True):
                own[seen] += found[held]
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), None, None


def _keys_of(
    product: _Product, own: tuple[Tensor, Tensor], before: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    keys, values = own
    if product.is_before:
        assert before is not None, "a part needs the memory of what stands before it"
        keys, values = before
    return keys[product.keys], values[product.keys]


def _mix(
    q_NHD: Tensor, own: tuple[Tensor, Tensor], attend: PassAttention, before: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """What each token has seen, and the logarithm of the mass of its keys."""
    out = torch.empty_like(q_NHD, dtype=widened(q_NHD[:0]).dtype)
    mass = out.new_empty(out.shape[:2])
    for product in attend.products:
        keys, values = _keys_of(product, own, before)
        seen, its_mass = _kernel(q_NHD[product.queries], keys, values, product.is_causal, attend.scale)
        if product.is_causal:  # the first call of these queries
            out[product.queries], mass[product.queries] = seen, its_mass
            continue
        out_here, mass_here = out[product.queries], mass[product.queries]
        total = torch.logaddexp(mass_here, its_mass)
        out_here.mul_((mass_here - total).exp_()[..., None]).add_(seen * (its_mass - total).exp_()[..., None])
        mass_here.copy_(total)
    return out, mass


def _mix_in_tiles(
    q_NHD: Tensor, own: tuple[Tensor, Tensor], attend: PassAttention, before: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q_NHD, dtype=torch.float32)
    mass = out.new_empty(out.shape[:2])
    for units in attend.units:
        longest, most = max(unit.num_queries for unit in units), max(unit.num_keys for unit in units)
        q = q_NHD.new_zeros(len(units), longest, *q_NHD.shape[1:])
        k, v = (x.new_zeros(len(units), most, *x.shape[1:]) for x in own)
        positions = torch.empty(len(units), longest, dtype=torch.int64)
        for row, unit in enumerate(units):
            q[row, : unit.num_queries] = q_NHD[unit.queries]
            # a padded query stands where the last one does; its result is dropped
            positions[row] = torch.arange(unit.num_keys - unit.num_queries, unit.num_keys - unit.num_queries + longest)
            positions[row].clamp_(max=unit.num_keys - 1)
            at = 0
            for is_before, run in unit.keys:
                keys, values = before if is_before and before is not None else own
                size = run.stop - run.start
                k[row, at : at + size], v[row, at : at + size] = keys[run], values[run]
                at += size
        seen, its_mass = tiled_attention_with_mass(q, k, v, positions, attend.scale)
        for row, unit in enumerate(units):
            out[unit.queries], mass[unit.queries] = seen[row, : unit.num_queries], its_mass[row, : unit.num_queries]
    return out, mass


def _kernel(q_NHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """What the queries see, [N, H, D], and the logarithm of the mass, [N, H]."""
    q, k, v = _by_key_head(q_NHD, k_SGD.shape[1]), _repeated(k_SGD, q_NHD), _repeated(v_SGD, q_NHD)
    out, mass = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    return out.permute(2, 0, 1, 3).flatten(1, 2), mass.permute(2, 0, 1).flatten(1, 2)


def _kernel_backward(
    gradient_NHD: Tensor,
    q_NHD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_NHD: Tensor,
    mass_NH: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`out_NHD` and `mass_NH` are of all keys that the queries see, so that these keys' part of the gradient comes out."""
    groups = k_SGD.shape[1]
    gradient, q, out = (_by_key_head(x, groups) for x in (gradient_NHD, q_NHD, out_NHD))
    k, v = _repeated(k_SGD, q_NHD), _repeated(v_SGD, q_NHD)
    mass = mass_NH.unflatten(1, (groups, -1)).permute(1, 2, 0)
    d_q, d_k, d_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, k, v, out, mass, 0.0, is_causal, scale=scale
    )
    return d_q.permute(2, 0, 1, 3).flatten(1, 2), d_k.sum(1).transpose(0, 1), d_v.sum(1).transpose(0, 1)


def _by_key_head(x_NHD: Tensor, groups: int) -> Tensor:
    """[G, R, N, D], a view."""
    return x_NHD.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)


def _repeated(x_SGD: Tensor, q_NHD: Tensor) -> Tensor:
    """[G, R, S, D], a view: the query heads of one key head share it."""
    groups = x_SGD.shape[1]
    return x_SGD.transpose(0, 1)[:, None].expand(-1, q_NHD.shape[1] // groups, -1, -1)
