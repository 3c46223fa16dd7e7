"""What a sampler expected of a weighted score, over the ids that it could have sampled:

C = sum over kept v of  sg(q_v w_v) log p_v          w_v = w(log p_v - log q_v)

q are the sampler's recorded probabilities, p the network's over the same kept ids, sg stops the gradient. Taking it from w_a log p_a
makes the expected gradient 0 whatever separates p from q (score centring, arXiv:2609.20807). Exact where the kept set is all that
can be sampled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from everlong.models.head import processed_log_softmax
from everlong.models.numerics import Numerics, linear, widened

# R rows, M model width, K kept ids over all rows, U ids that some row keeps

Weigh = Callable[[Tensor], Tensor]
"""From log(p/q), [K], to the weight of each id."""


def expected_scores(
    hidden_RM: Tensor,
    head_weight_VM: Tensor,
    temperatures_R: Tensor,
    kept: tuple[Tensor, Tensor],
    sampler_logprobs_K: Tensor,
    weigh: Weigh,
    numerics: Numerics,
    chunk_rows: int = 512,
) -> Tensor:
    """float32 [R], with its gradient; 0 for a row whose kept set is empty, which was not truncated. Logits exist for `chunk_rows` rows at
    a time, of the ids alone that one of them keeps."""
    ids, offsets = kept
    parts = [hidden_RM.new_zeros(0)]
    for start in range(0, len(hidden_RM), chunk_rows):
        stop = min(start + chunk_rows, len(hidden_RM))
        span = slice(int(offsets[start]), int(offsets[stop]))
        parts.append(
            _Chunk.apply(
                hidden_RM[start:stop], head_weight_VM, temperatures_R[start:stop], ids[span].long(),
                offsets[start : stop + 1].diff(), sampler_logprobs_K[span], weigh, numerics,
            )
        )  # fmt: skip
    return torch.cat(parts)


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        head_weight: Tensor,
        temperature: Tensor,
        ids_K: Tensor,
        sizes_R: Tensor,
        sampler_K: Tensor,
        weigh: Weigh,
        numerics: Numerics,
    ) -> Tensor:
        rows_K = torch.repeat_interleave(torch.arange(len(sizes_R)), sizes_R)
        ids_U, places_K = ids_K.unique(return_inverse=True)
        keep_RU = torch.zeros(len(sizes_R), len(ids_U), dtype=torch.bool)
        keep_RU[rows_K, places_K] = True
        keep_RU[sizes_R == 0] = True  # such a row is of no use, and must not make a NaN
        if not len(ids_U):
            ctx.nothing = True
            return hidden.new_zeros(len(hidden))
        logits_RU = widened(linear(hidden, head_weight[ids_U], numerics))
        logprobs_RU = processed_log_softmax(logits_RU, temperature, keep_RU)
        logprobs_K = logprobs_RU[rows_K, places_K]
        coefficients_K = sampler_K.exp() * weigh(logprobs_K - sampler_K)
        coefficients_RU = torch.zeros_like(logprobs_RU)
        coefficients_RU[rows_K, places_K] = coefficients_K
        ctx.nothing, ctx.numerics = False, numerics
        ctx.save_for_backward(hidden, head_weight, temperature, ids_U, coefficients_RU, logprobs_RU)
        return torch.where(keep_RU, coefficients_RU * logprobs_RU.clamp(min=-1e30), 0.0).sum(-1)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.nothing:
            return (None,) * 8
        hidden, head_weight, temperature, ids_U, coefficients_RU, logprobs_RU = ctx.saved_tensors
        # d C / d logits = (c_v - p_v sum c) / temperature
        d_logits = coefficients_RU - logprobs_RU.exp() * coefficients_RU.sum(-1, keepdim=True)
        d_logits = d_logits * (gradients[0] / temperature)[:, None]
        dtype = torch.float32 if ctx.numerics is Numerics.ALIGNED else head_weight.dtype
        d_logits, weight = d_logits.to(dtype), head_weight[ids_U].to(dtype)
        d_hidden = (d_logits @ weight).to(hidden.dtype)
        if not ctx.needs_input_grad[1]:
            return d_hidden, *(None,) * 7
        d_weight = (d_logits.T @ hidden.to(dtype)).to(head_weight.dtype)
        return d_hidden, torch.zeros_like(head_weight).index_copy_(0, ids_U, d_weight), *(None,) * 6
