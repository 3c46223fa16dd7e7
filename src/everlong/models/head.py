"""The one path from hidden state to processed logprob, for engine and trainer alike, so that their bits can agree.

Processing order: logits in float32 -> padded vocabulary rows to -inf -> temperature -> kept set -> log-softmax. The
kept set is decided once, at sampling, and replayed from the record ever after (DeepSeek-V3.2, arXiv:2512.02556 §3.1).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from everlong.models.llama.config import LlamaConfig
from everlong.models.numerics import Numerics, linear

# T tokens, M model width, V padded vocabulary, K kept ids over all tokens


def logits_of(hidden_TM: Tensor, head_weight_VM: Tensor, config: LlamaConfig, numerics: Numerics) -> Tensor:
    """float32 [T, V]; rows of the vocabulary that no token has are -inf."""
    logits = linear(hidden_TM, head_weight_VM, numerics).float()
    if config.padded_vocab_size > config.vocab_size:
        logits = logits.index_fill(-1, torch.arange(config.vocab_size, config.padded_vocab_size), -torch.inf)
    return logits


def truncate(logits_TV: Tensor, temperature_T: Tensor, top_k_T: Tensor, top_p_T: Tensor) -> Tensor:
    """bool [T, V]: the top k, and of these the smallest set whose mass reaches top_p (Holtzman et al. 2019, arXiv:1904.09751).

    A token is kept while the mass before it is below top_p, so at least one is; of equal probabilities the lower id
    comes first. top_k 0 keeps all, and so does top_p 1.
    """
    tempered = logits_TV / temperature_T[:, None]
    ranked, order = tempered.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    top_k = torch.where(top_k_T > 0, top_k_T, ranked.shape[-1])[:, None]
    ranked = ranked.masked_fill(rank >= top_k, -torch.inf)
    mass = ranked.softmax(-1)
    # the first mass may round to 1, and top_p 1 removes nothing
    before = torch.where(top_p_T[:, None] < 1, mass.cumsum(-1) - mass, 0.0)
    kept = (before < top_p_T[:, None]) & (ranked > -torch.inf)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def processed_log_softmax(logits_TV: Tensor, temperature_T: Tensor, keep_TV: Tensor | None) -> Tensor:
    """Log of the distribution that is sampled from: -inf outside the kept set, exactly 0 where one token is kept.

    The sum always runs over the whole row, so its bits do not depend on the size of the set.
    """
    tempered = logits_TV / temperature_T[:, None]
    if keep_TV is not None:
        tempered = tempered.masked_fill(~keep_TV, -torch.inf)
    return tempered.log_softmax(-1)


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
) -> tuple[Tensor, Tensor]:
    """Logprob of each label, float32 [T], and the entropy of the tempered but untruncated distribution, detached, [T].

    Logits exist for `chunk_tokens` rows at a time, forward and backward: peak extra memory is chunk_tokens * V. `kept`
    is (ids, offsets) of recorded kept sets. Raises ValueError where a set lacks its label.
    """
    logprobs, entropies = [], []
    for start in range(0, len(labels_T), chunk_tokens):
        stop = min(start + chunk_tokens, len(labels_T))
        rows = None
        if kept is not None:
            ids, offsets = kept
            rows = ids[offsets[start] : offsets[stop]], offsets[start : stop + 1] - offsets[start]
        part = checkpoint(
            _chunk, hidden_TM[start:stop], head_weight_VM, labels_T[start:stop], temperature_T[start:stop], rows, start,
            config, numerics, use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        logprobs.append(part[0])
        entropies.append(part[1])
    if not logprobs:
        empty = hidden_TM.new_zeros(0)
        return empty, empty
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    temperature: Tensor,
    kept: tuple[Tensor, Tensor] | None,
    first_token: int,
    config: LlamaConfig,
    numerics: Numerics,
) -> tuple[Tensor, Tensor]:
    logits = logits_of(hidden, head_weight, config, numerics)
    keep = None
    if kept is not None and len(kept[0]):
        keep = keep_mask(*kept, vocab_rows=logits.shape[-1])
        outside = ~keep.gather(-1, labels[:, None])[:, 0]
        if outside.any():
            token = int(outside.nonzero()[0])
            raise ValueError(
                f"kept set of token {first_token + token} lacks its id {int(labels[token])}: refuse the record"
            )
    logprobs = processed_log_softmax(logits, temperature, keep).gather(-1, labels[:, None])[:, 0]
    with torch.no_grad():
        full = F.log_softmax(logits / temperature[:, None], -1)
        entropy = -(full.exp() * full.clamp(min=-1e30)).sum(-1)
    return logprobs, entropy
