"""Packed trees through the network: all tokens at once, or part by part with the same gradients.

A part's queries need of earlier parts their keys and values alone. So a tree that is too large for one pass is cut anywhere: the
parts are passed in order, each leaves its keys and values behind, and nothing else is held. Backward takes them in reverse order:
a part is passed again, with its graph; what its queries find for the keys of earlier parts is added up where those lie, and goes
on down once it is their turn (the boundary gradients of tree training, arXiv:2511.00413). It costs one more forward pass. Memory
is one part's graph, and keys and values of every layer, each with a gradient, of the tokens that a later part sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from everlong.contracts.records import MicroBatch
from everlong.models.attention import KeyMemory, PassAttention
from everlong.models.decisions import TokenDecide
from everlong.models.llama.model import Llama
from everlong.models.numerics import widened
from everlong.models.tree_layout import Run, lay_out

# T tokens of the trees, N of a part, R wanted rows, M model width

Read = Callable[[Tensor, np.ndarray], tuple[Tensor, ...]]
"""From hidden states [N, M] and the rows that they are for, int64[N], to tensors of N rows."""


def read_states(
    model: Llama,
    weights: Sequence[Tensor],
    micro_batch: MicroBatch,
    tokens_R: np.ndarray,
    read: Read,
    decide: TokenDecide | None = None,
) -> tuple[Tensor, ...]:
    """What `read` makes of the hidden states of the R tokens, each behind what stands before it on its path.

    `weights` are all that trains of what the network and `read` use. `read` is called for all rows at once, or where the pass is cut
    for those of each part, forward and again backward. So is `decide`, of all tokens; without it the network chooses for itself.
    """
    forest = _Forest(model, micro_batch, decide)
    rows = torch.from_numpy(forest.layout.place[tokens_R])
    limit = micro_batch.pass_tokens
    if limit is None or len(forest.layout) <= limit:
        return read(forest.hidden_states(forest.whole)[rows], np.arange(len(tokens_R)))
    return _CutPass.apply(_Cut(forest, parts_of(len(forest.layout), limit), rows.numpy(), read), *weights)


def parts_of(num_tokens: int, limit: int) -> tuple[Run, ...]:
    """As few parts as the limit allows, of nearly one size."""
    count = -(-num_tokens // limit)
    ends = [num_tokens * index // count for index in range(count + 1)]
    return tuple(pairwise(ends))


class _Forest:
    """A micro-batch's tokens as they are laid out."""

    def __init__(self, model: Llama, micro_batch: MicroBatch, decide: TokenDecide | None) -> None:
        segments = [(segment.parent, segment.start, segment.length) for segment in micro_batch.segments]
        self._model, self.layout, self._decide = model, lay_out(segments), decide
        order = self.layout.order
        self._tokens = torch.from_numpy(order)
        self._ids = torch.from_numpy(micro_batch.columns.ids[order].astype(np.int64))
        self._positions = torch.from_numpy(micro_batch.positions()[order].astype(np.int64))

    @property
    def whole(self) -> Run:
        return 0, len(self.layout)

    def hidden_states(
        self, part: Run, memory: KeyMemory | None = None, *, remembers: bool = False, again: bool = False
    ) -> Tensor:
        """[N, M] of the part's tokens, which have passed before where they pass `again`."""
        scale, numerics = self._model.config.head_dim**-0.5, self._model.numerics
        attend = PassAttention(self.layout, scale, numerics, part, memory, remembers=remembers)
        own = slice(*part)
        # a network that decides nothing may have a forward that takes no `decide`
        decide = () if self._decide is None else (self._decide.of(self._tokens[own], again=again),)
        return self._model(self._ids[own], self._positions[own], attend, *decide)


@dataclass(frozen=True, slots=True)
class _Cut:
    forest: _Forest
    parts: tuple[Run, ...]
    places_R: np.ndarray
    """Where the wanted hidden states stand."""
    read: Read

    def rows_of(self, part: Run) -> np.ndarray:
        return np.flatnonzero((self.places_R >= part[0]) & (self.places_R < part[1]))

    def states_of(self, hidden_NM: Tensor, part: Run, rows: np.ndarray) -> Tensor:
        return hidden_NM[torch.from_numpy(self.places_R[rows] - part[0])]


class _CutPass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, cut: _Cut, *weights: Tensor) -> tuple[Tensor, ...]:
        memory = KeyMemory(cut.forest.layout, cut.parts)
        rows, found = [], []
        for part in cut.parts:
            rows.append(cut.rows_of(part))
            hidden = cut.forest.hidden_states(part, memory, remembers=True)
            found.append(cut.read(cut.states_of(hidden, part, rows[-1]), rows[-1]))
        ctx.cut, ctx.memory, ctx.weights = cut, memory, weights
        back = torch.from_numpy(np.argsort(np.concatenate(rows)))
        return tuple(torch.cat(parts)[back] for parts in zip(*found, strict=True))

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cut, memory, weights = ctx.cut, ctx.memory, ctx.weights
        sums: list[Tensor | None] = [None] * len(weights)
        for part in reversed(cut.parts):
            with torch.enable_grad():
                hidden = cut.forest.hidden_states(part, memory, again=True)
                rows = cut.rows_of(part)
                read = cut.read(cut.states_of(hidden, part, rows), rows) if len(rows) else ()
            if not hidden.requires_grad:
                continue
            # with nothing to read of a part its keys still have gradients, which a gradient of 0 brings down
            outputs, grads = [hidden], [torch.zeros_like(hidden)]
            for output, gradient in zip(read, gradients, strict=False):
                if output.requires_grad:
                    outputs.append(output)
                    grads.append(gradient[torch.from_numpy(rows)])
            found = torch.autograd.grad(outputs, weights, grads, allow_unused=True)
            sums = [_plus(total, own) for total, own in zip(sums, found, strict=True)]
        return None, *(None if s is None else s.to(w.dtype) for s, w in zip(sums, weights, strict=True))


def _plus(total: Tensor | None, found: Tensor | None) -> Tensor | None:
    if found is None:
        return total
    return widened(found) if total is None else total.add_(found)
