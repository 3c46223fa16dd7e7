"""Which experts a token goes to, with what weights, and the sum of what they say.

With scores s of the router's logits and I the chosen, an expert i in I has the weight

softmax:  e^{z_i} / sum over I of e^{z_j}, or the same over all experts where weights are not normalised;
sigmoid:  s_i / sum over I of s_j with s = 1 / (1 + e^{-z}), or s_i itself (DeepSeek-V3, arXiv:2412.19437).

I may come from a record: then the weights are of the present logits at the recorded experts, so the router has its gradient
whatever it would have chosen itself (R3, arXiv:2510.11370). They are never read from scores that were set to 0 outside an own
choice, which would give a recorded expert the weight 0 and the router no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from everlong.models.decisions import Decide
from everlong.models.moe.config import EXPERT_WEIGHTS, EXPERTS, MoeConfig
from everlong.models.numerics import Numerics, steady

# T tokens, E experts, K of them per token, M model width, R rows of one expert

TINY = 1e-20
"""Added to a sum of scores, all of which may underflow."""


def route(
    logits_TE: Tensor, config: MoeConfig, layer: int, decide: Decide, numerics: Numerics
) -> tuple[Tensor, Tensor]:
    """Chosen experts int64 [T, K] and their weights [T, K], in the order in which they are summed."""
    chosen_TK = decide(EXPERTS, layer, choose(logits_TE.detach(), config.experts_per_token))
    weights_TK = gate_weights(logits_TE, chosen_TK, config, numerics)
    return chosen_TK, decide(EXPERT_WEIGHTS, layer, weights_TK)


def choose(logits_TE: Tensor, count: int) -> Tensor:
    """int64 [T, K], the highest first; of equal ones the lower number, on every machine."""
    return logits_TE.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def gate_weights(logits_TE: Tensor, chosen_TK: Tensor, config: MoeConfig, numerics: Numerics) -> Tensor:
    chosen_logits_TK = logits_TE.gather(-1, chosen_TK)
    if config.router == "softmax":
        if config.normalised:
            return chosen_logits_TK.softmax(-1)
        return logits_TE.softmax(-1).gather(-1, chosen_TK)
    aligned = numerics is Numerics.ALIGNED
    scores_TK = steady(torch.sigmoid, chosen_logits_TK) if aligned else torch.sigmoid(chosen_logits_TK)
    if not config.normalised:
        return scores_TK
    return scores_TK / (_sum(scores_TK.unbind(-1))[:, None] + TINY)


def mix(x_TM: Tensor, chosen_TK: Tensor, weights_TK: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Sum over a token's experts of weight times `expert(number, rows [R, M])`, [T, M] in the weights' type.

    Rows are sorted by expert, so each is asked once. A token's bits depend on its own row and experts alone as far as those of
    `expert` do: the sum is taken in the order of the choice.
    """
    slots = chosen_TK.flatten()
    order = slots.argsort(stable=True)
    back = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
    sizes = slots.bincount().tolist()
    rows = _take(x_TM, order // chosen_TK.shape[1]).split(sizes)
    said = torch.cat([expert(number, part).to(weights_TK.dtype) for number, part in enumerate(rows) if len(part)])
    said_TKM = _take(said, back).unflatten(0, chosen_TK.shape)
    return _sum([said_TKM[:, k] * weights_TK[:, k, None] for k in range(chosen_TK.shape[1])])


def _take(x: Tensor, places: Tensor) -> Tensor:
    """x[places], whose gradient is summed in one order."""
    return F.embedding(places, x)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """In this order: a reduction's own order may follow from its shape."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
