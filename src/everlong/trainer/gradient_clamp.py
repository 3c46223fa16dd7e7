"""Fine-grained clamp of gradients where they flow: each layer's hidden-state gradient, in its backward pass

g <- g min(1, bound / |g|)        per token, or per element

A layer's bound lets `share` of its gradients of the optimiser step before pass: it comes from a histogram of the whole step, which adds up
counts, so that it depends neither on how a batch is cut nor on who computed what. Norms are counted as they arrive, before the
clamp, in bins of a power of two in 32 parts; a bound is a bin's lower edge, so at most 3 % above the exact one. Gradients are those of the
un-normalised sum. Vectors that are 0, of tokens that nothing behind them learns from, are no part of the count. Where a cut repeats a shared
prompt, each copy has a gradient of its own. Without a step before, or with fewer than 1 / share gradients in it, nothing is clamped.

The clamp is described in the report on Step 5; quantile, histogram and rounding are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from everlong.trainer.clamp_config import HiddenClamp
from everlong.trainer.ranks.ranks import OwnedGradient, Ranks
from everlong.trainer.tally import Tally

# T tokens, M model width, L layers, B bins

PREFIX = "clamp/"
"""Of its tensors in a checkpoint."""
SHIFT = 18
"""Bits of a float32 below its sign, exponent and first five of the fraction, which together are its bin."""
NUM_BINS = 1 << (31 - SHIFT)
INFINITY_BIN = 0x7F800000 >> SHIFT


class HiddenGradientClamp:
    """Bounds of one step and the histogram that the next one's come from."""

    def __init__(self, config: HiddenClamp, num_layers: int) -> None:
        self._config = config
        self._before_LB = torch.zeros(num_layers, NUM_BINS, dtype=torch.int64)
        self._bounds = bounds_of(self._before_LB, config.share)
        self._begin()

    def _begin(self) -> None:
        self._counts_LB, self._num_clamped, self._is_passed = torch.zeros_like(self._before_LB), 0, False

    def __call__(self, layer: int, hidden_TM: Tensor) -> Tensor:
        """The same hidden states, whose gradient is clamped on its way back."""
        self._is_passed = True
        return _Gate.apply(hidden_TM, self, layer)

    def clamp(self, layer: int, gradient_TM: Tensor) -> Tensor:
        bound = self._bounds[layer]
        if self._config.of == "elements":
            sizes = gradient_TM.abs()
            # an infinite one stays, and stops the step
            clamped = torch.where(sizes < float("inf"), gradient_TM.clamp(-bound, bound), gradient_TM)
        else:
            sizes = torch.linalg.vector_norm(gradient_TM, dim=-1, keepdim=True)
            clamped = torch.where(sizes > bound, gradient_TM * (bound / sizes), gradient_TM)
        self._counts_LB[layer] += histogram(sizes)
        self._num_clamped += int((sizes > bound).sum())
        return clamped

    def close_step(self, ranks: Ranks, tally: Tally) -> None:
        """What was counted since the last one, by all ranks, makes the bounds of the next. Raises ValueError where no pass came by."""
        found = ranks.gather((self._counts_LB, self._num_clamped, self._is_passed))
        if not any(is_passed for *_, is_passed in found):
            raise ValueError(
                "trainer.gradient_clamp.type=hidden found no layer in the network's forward: a subclass of Llama with a forward of "
                "its own must call `tap.after_layer` behind each layer"
            )
        counts_LB, num_clamped = torch.stack([counts for counts, *_ in found]).sum(0), sum(each[1] for each in found)
        number, highest = int(counts_LB.sum()), counts_LB.sum(0).nonzero()
        tally.total("clamp/clamped", num_clamped)
        if number:
            tally.mean("clamp/share", num_clamped / number)
            tally.mean("clamp/highest", _edge(int(highest[-1, 0]) + 1))
        tally.mean("clamp/bounded_layers", sum(bound < float("inf") for bound in self._bounds))
        self._before_LB = counts_LB
        self._bounds = bounds_of(counts_LB, self._config.share)
        self._begin()

    def state(self) -> dict[str, Tensor]:
        return {f"{PREFIX}histogram": self._before_LB}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError, and changes nothing, unless the state is of a clamp of this model."""
        histogram = state.get(f"{PREFIX}histogram")
        if histogram is None or histogram.shape != self._before_LB.shape:
            raise ValueError(
                "the checkpoint holds no histogram of this model's hidden gradients, and trainer.gradient_clamp.type=hidden needs "
                "it: resume with the settings of the run"
            )
        self._before_LB = histogram.clone()
        self._bounds = bounds_of(self._before_LB, self._config.share)
        self._begin()

    def reset(self) -> None:
        """As if no step had been made."""
        self._before_LB = torch.zeros_like(self._before_LB)
        self._bounds = bounds_of(self._before_LB, self._config.share)
        self._begin()


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_TM: Tensor, clamp: HiddenGradientClamp, layer: int) -> Tensor:
        ctx.clamp, ctx.layer = clamp, layer
        return hidden_TM.view_as(hidden_TM)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.clamp.clamp(ctx.layer, gradients[0]), None, None


def histogram(sizes: Tensor) -> Tensor:
    """int64 [B], of the numbers that are not 0; none is negative."""
    bits = sizes.detach().float().contiguous().view(torch.int32).flatten()
    return torch.bincount(bits[bits > 0] >> SHIFT, minlength=NUM_BINS)


def bounds_of(counts_LB: Tensor, share: float) -> list[float]:
    """Per layer the lowest edge beyond which at most `share` of the counted lie; inf where that is less than 1 of them."""
    bounds = []
    for counts_B in counts_LB:
        allowed = int(share * int(counts_B.sum()))
        beyond_B = counts_B.flip(0).cumsum(0).flip(0)
        bounds.append(_edge(int((beyond_B <= allowed).nonzero()[0, 0])) if allowed else float("inf"))
    return bounds


def _edge(place: int) -> float:
    """Where a bin begins."""
    if place >= INFINITY_BIN:
        return float("inf")
    return float(torch.tensor(place << SHIFT, dtype=torch.int32).view(torch.float32))


@torch.no_grad()
def clamp_weights(weights: Mapping[str, Tensor], gradient: OwnedGradient, share: float, ranks: Ranks) -> int:
    """Cut the largest elements of each layer's gradient in place, k = floor(share n) of n, to the size of the next; what belongs to no
    layer counts tensor by tensor. Returns how many were cut, by all ranks."""
    sizes: Counter[str] = Counter()
    own: dict[str, list[Tensor]] = {}
    for (name, weight), part in zip(weights.items(), gradient, strict=True):
        sizes[layer_of(name)] += weight.numel()
        if part is not None:
            own.setdefault(layer_of(name), []).append(part)
    cuts = {layer: int(share * size) for layer, size in sizes.items() if int(share * size)}
    found = ranks.gather({layer: _largest(own[layer], cuts[layer] + 1) for layer in cuts if layer in own})
    num_cut = 0
    for layer, cut in cuts.items():
        bound = float(torch.cat([largest[layer] for largest in found if layer in largest]).topk(cut + 1).values[-1])
        for part in own.get(layer, ()):
            num_cut += int((part.abs() > bound).sum())
            part.clamp_(-bound, bound)
    return sum(ranks.gather(num_cut))


def layer_of(name: str) -> str:
    """`model.layers.3` of every weight of that layer, and its own name of any other."""
    prefix, layers, rest = name.partition(".layers.")
    return f"{prefix}{layers}{rest.split('.')[0]}" if layers else name


def _largest(parts: Sequence[Tensor], count: int) -> Tensor:
    """Sizes of the largest elements, as many or all."""
    each = [part.abs().flatten().topk(min(count, part.numel())).values for part in parts]
    together = torch.cat(each)
    return together.topk(min(count, len(together))).values
