"""The one path from hidden state to processed logprob, for engine and trainer alike, so that their bits can agree.

Processing order: logits in float32 -> padded vocabulary rows to -inf -> temperature -> kept set -> log-softmax. The
kept set is decided once, at sampling, and replayed from the record ever after (DeepSeek-V3.2, arXiv:2512.02556 §3.1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everlong.models.llama.config import LlamaConfig
from everlong.models.numerics import Numerics, linear, steady, widened
from everlong.models.projection import Projection, zero_sum

# T tokens, M model width, V padded vocabulary, K kept ids over all tokens


def logits_of(hidden_TM: Tensor, head_weight_VM: Tensor, config: LlamaConfig, numerics: Numerics) -> Tensor:
    """float32 [T, V]; rows of the vocabulary that no token has are -inf."""
    return hide_padding(widened(linear(hidden_TM, head_weight_VM, numerics)), config)


def hide_padding(logits_TV: Tensor, config: LlamaConfig) -> Tensor:
    """Rows of the vocabulary that no token has become -inf."""
    if config.padded_vocab_size == config.vocab_size:
        return logits_TV
    return logits_TV.index_fill(-1, torch.arange(config.vocab_size, config.padded_vocab_size), -torch.inf)


def truncate(logits_TV: Tensor, temperature_T: Tensor, top_k_T: Tensor, top_p_T: Tensor) -> Tensor:
    """bool [T, V]: the top k, and of these the smallest set whose mass reaches top_p (Holtzman et al. 2019, arXiv:1904.09751).

    A token is kept while the mass before it is below top_p, so at least one is; of equal probabilities the lower id
    comes first. top_k 0 keeps all, and so does top_p 1. A row's set depends on that row alone.
    """
    logprobs = _temper(logits_TV, temperature_T).log_softmax(-1)
    size, lowest = _kept_size(_ranked(logprobs, top_k_T, top_p_T), top_k_T, top_p_T)
    above, equal = logprobs > lowest[:, None], logprobs == lowest[:, None]
    missing = size - above.sum(-1)
    if (rows := (equal.sum(-1) > missing).nonzero()[:, 0]).numel():
        equal[rows] &= equal[rows].cumsum(-1) <= missing[rows, None]
    return above | equal


def _ranked(logprobs_TV: Tensor, top_k_T: Tensor, top_p_T: Tensor) -> Tensor:
    """The logprobs that can matter, highest first, [T, most of a row], behind them -inf.

    Sorting whole rows would take most of a sampling step. Where only top_p cuts, the tokens below (1 - top_p) / 2V have
    together less than half of the mass that is cut, so none of them is kept.
    """
    lowest = torch.where(top_k_T > 0, -torch.inf, ((1 - top_p_T) / (2 * logprobs_TV.shape[-1])).log())
    matter = (logprobs_TV >= lowest[:, None]).numpy()
    row, column = np.nonzero(matter)
    counts = matter.sum(1)
    ranked = np.full((len(counts), counts.max(initial=1)), np.inf, np.float32)
    ranked[row, np.arange(len(row)) - np.repeat(counts.cumsum() - counts, counts)] = -logprobs_TV.numpy()[row, column]
    ranked.sort(1)
    return torch.from_numpy(-ranked)


def _kept_size(ranked_TK: Tensor, top_k_T: Tensor, top_p_T: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens a row keeps, int64 [T], and the lowest logprob of these."""
    limited = top_k_T > 0
    inside = ~limited[:, None] | (torch.arange(ranked_TK.shape[-1]) < top_k_T[:, None])
    mass = steady(torch.exp, ranked_TK)
    if limited.any():  # among the top k the mass is of these alone
        alone = ranked_TK.masked_fill(~inside, -torch.inf).softmax(-1)
        mass = torch.where(limited[:, None], alone, mass)
    # the first mass may round to 1, and top_p 1 removes nothing
    before = torch.where(top_p_T[:, None] < 1, mass.cumsum(-1) - mass, 0.0)
    size = (inside & (before < top_p_T[:, None]) & (ranked_TK > -torch.inf)).sum(-1)
    return size, ranked_TK.gather(-1, (size - 1).clamp(min=0)[:, None])[:, 0]


def processed_log_softmax(logits_TV: Tensor, temperature_T: Tensor, keep_TV: Tensor | None) -> Tensor:
    """Log of the distribution that is sampled from: -inf outside the kept set, exactly 0 where one token is kept.

    The sum always runs over the whole row, so its bits do not depend on the size of the set.
    """
    tempered = _temper(logits_TV, temperature_T)
    if keep_TV is not None:
        tempered = tempered.masked_fill(~keep_TV, -torch.inf)
    return tempered.log_softmax(-1)


def _temper(logits_TV: Tensor, temperature_T: Tensor) -> Tensor:
    """The same bits whether or not the division by 1 is done, which is a pass over all logits each way."""
    return logits_TV if bool((temperature_T == 1).all()) else logits_TV / temperature_T[:, None]


def keep_mask(kept_ids_K: Tensor, offsets: Tensor, vocab_rows: int) -> Tensor:
    """bool [T, V] from compressed rows; an empty row keeps the whole vocabulary."""
    sizes = offsets.diff()
    mask = (sizes == 0)[:, None].repeat(1, vocab_rows)
    rows = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    mask[rows, kept_ids_K.long()] = True
    return mask


def token_logprobs(
    hidden_TM: Tensor,
    head_weight_VM: Tensor,
    config: LlamaConfig,
    labels_T: Tensor,
    temperature_T: Tensor,
    kept: tuple[Tensor, Tensor] | None,
    numerics: Numerics,
    chunk_tokens: int = 512,
    projection: Projection = "none",
) -> tuple[Tensor, Tensor]:
    """Logprob of each label, float32 [T], and the entropy of the tempered but untruncated distribution, detached, [T].

    Logits exist for `chunk_tokens` rows at a time, forward and backward: peak extra memory is chunk_tokens * V. `kept`
    is (ids, offsets) of recorded kept sets. `projection` is of the logit gradient, as the products of the backward pass take it:
    they are in float32 then, since a cast to bfloat16 would bring the common part back. Raises ValueError where a set lacks its label.
    """
    rows = _Rows(labels_T, temperature_T, kept)
    return _Chunks.apply(hidden_TM, head_weight_VM, rows, config, numerics, chunk_tokens, projection)


@dataclass(frozen=True, slots=True)
class _Rows:
    labels_T: Tensor
    temperature_T: Tensor
    kept: tuple[Tensor, Tensor] | None

    def take(self, run: slice) -> _Rows:
        kept = self.kept
        if kept is not None:
            ids, offsets = kept
            kept = ids[offsets[run.start] : offsets[run.stop]], offsets[run.start : run.stop + 1] - offsets[run.start]
        return _Rows(self.labels_T[run], self.temperature_T[run], kept)

    def keep_TV(self, vocab_rows: int) -> Tensor | None:
        """None where no row has a set."""
        return None if self.kept is None or not len(self.kept[0]) else keep_mask(*self.kept, vocab_rows=vocab_rows)


class _Chunks(torch.autograd.Function):
    """Logprobs and entropies, chunk by chunk. Backward computes a chunk's logits again, but of those ids alone that one of its rows
    keeps: with recorded kept sets most of the vocabulary has no gradient. The weight's gradient is summed in place."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        head_weight: Tensor,
        rows: _Rows,
        config: LlamaConfig,
        numerics: Numerics,
        chunk_tokens: int,
        projection: Projection,
    ) -> tuple[Tensor, Tensor]:
        logprobs = widened(hidden[:0]).new_empty(len(hidden))
        entropies = torch.empty_like(logprobs)
        for run in _runs(len(hidden), chunk_tokens):
            own = rows.take(run)
            logits = logits_of(hidden[run], head_weight, config, numerics)
            keep = own.keep_TV(logits.shape[-1])
            if keep is not None:
                _check_labels(keep, own.labels_T, run.start)
            processed = processed_log_softmax(logits, own.temperature_T, keep)
            logprobs[run] = processed.gather(-1, own.labels_T[:, None])[:, 0]
            full = processed if keep is None else processed_log_softmax(logits, own.temperature_T, None)
            # in place, since fresh memory for a chunk of logits costs as much as the arithmetic
            entropies[run] = full.exp().mul_(full.clamp_(min=-1e30)).sum(-1).neg_()
        ctx.save_for_backward(hidden, head_weight)
        ctx.rows, ctx.config, ctx.numerics, ctx.chunk_tokens, ctx.projection = (
            rows,
            config,
            numerics,
            chunk_tokens,
            projection,
        )
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head_weight = ctx.saved_tensors
        d_hidden, d_weight = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(head_weight, dtype=widened(head_weight[:0]).dtype)
        for run in _runs(len(hidden), ctx.chunk_tokens):
            d_hidden[run] = _chunk_backward(
                gradients[0][run],
                hidden[run],
                head_weight,
                d_weight,
                ctx.rows.take(run),
                ctx.config,
                ctx.numerics,
                ctx.projection,
            )
        return d_hidden, None if d_weight is None else d_weight.to(head_weight.dtype), *(None,) * 5


def _chunk_backward(
    gradient_T: Tensor,
    hidden_TM: Tensor,
    head_weight_VM: Tensor,
    d_weight_VM: Tensor | None,
    rows: _Rows,
    config: LlamaConfig,
    numerics: Numerics,
    projection: Projection,
) -> Tensor:
    """The gradient of the hidden states; the weight's is added to `d_weight_VM`."""
    ids = _kept_somewhere(rows.kept)
    if ids is None:
        weight, places = head_weight_VM, rows.labels_T
        logits, keep = logits_of(hidden_TM, weight, config, numerics), rows.keep_TV(len(weight))
        if keep is not None:
            keep[:, config.vocab_size :] = False
    else:
        assert rows.kept is not None
        weight, places = head_weight_VM[ids], torch.searchsorted(ids, rows.labels_T)
        logits = widened(linear(hidden_TM, weight, numerics))
        keep = keep_mask(torch.searchsorted(ids, rows.kept[0].long()), rows.kept[1], vocab_rows=len(ids))
    # d logprob / d logits = (one at the label, minus the distribution) / temperature
    scale_T = gradient_T / rows.temperature_T
    d_logits = processed_log_softmax(logits, rows.temperature_T, keep).exp_().mul_(-scale_T[:, None])
    d_logits.scatter_add_(-1, places[:, None], scale_T[:, None])
    d_logits = zero_sum(d_logits, config.vocab_size if keep is None else keep, places, projection)
    dtype = head_weight_VM.dtype
    if numerics is Numerics.ALIGNED or projection != "none":
        dtype = widened(head_weight_VM[:0]).dtype
    d_logits, weight, hidden = d_logits.to(dtype), weight.to(dtype), hidden_TM.to(dtype)
    if d_weight_VM is not None:
        if ids is not None:
            d_weight_VM[ids] += (d_logits.T @ hidden).to(d_weight_VM.dtype)
        elif dtype is d_weight_VM.dtype:
            d_weight_VM.addmm_(d_logits.T, hidden)
        else:
            d_weight_VM += d_logits.T @ hidden
    return (d_logits @ weight).to(hidden_TM.dtype)


def _runs(num_tokens: int, chunk_tokens: int) -> list[slice]:
    return [slice(start, min(start + chunk_tokens, num_tokens)) for start in range(0, num_tokens, chunk_tokens)]


def _kept_somewhere(kept: tuple[Tensor, Tensor] | None) -> Tensor | None:
    """Ids that some row keeps, ascending, int64; None where a row keeps the whole vocabulary."""
    if kept is None or bool((kept[1].diff() == 0).any()):
        return None
    return kept[0].long().unique()


def _check_labels(keep_TV: Tensor, labels_T: Tensor, first_token: int) -> None:
    outside = ~keep_TV.gather(-1, labels_T[:, None])[:, 0]
    if outside.any():
        token = int(outside.nonzero()[0])
        raise ValueError(
            f"kept set of token {first_token + token} lacks its id {int(labels_T[token])}: refuse the record"
        )
