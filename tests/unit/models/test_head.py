"""From hidden state to processed logprob: every expected value was worked out by hand or by a plain reference."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from everlong.models.head import keep_mask, logits_of, processed_log_softmax, token_logprobs, truncate
from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.models.numerics import Numerics

# T tokens, V vocabulary rows, M model width


def config_of(vocab_size: int, padded: int | None = None, width: int = 8, **changes: object) -> LlamaConfig:
    shape = {"intermediate_size": 8, "num_layers": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 2}
    return LlamaConfig(
        vocab_size=vocab_size, padded_vocab_size=padded or vocab_size, hidden_size=width, **{**shape, **changes}
    )


def score(
    logits_TV: Tensor, labels: list[int], temperature: list[float], kept: tuple[list[int], list[int]] | None = None
) -> tuple[Tensor, Tensor]:
    """Logprobs of labels where the head is the identity, so that hidden states are the logits."""
    width = logits_TV.shape[1]
    sets = None if kept is None else (torch.tensor(kept[0], dtype=torch.int32), torch.tensor(kept[1]))
    return token_logprobs(
        logits_TV,
        torch.eye(width),
        config_of(width, width=width),
        torch.tensor(labels),
        torch.tensor(temperature),
        sets,
        Numerics.FAST,
    )


def keep(logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> list[int]:
    mask = truncate(torch.tensor([logits]), torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p]))
    return mask[0].nonzero()[:, 0].tolist()


def test_temperature_is_each_tokens_own():
    logprobs, _ = score(torch.tensor([[2.0, 0.0, -1.0]] * 2), [0, 0], [0.5, 1.0])
    assert logprobs.tolist() == pytest.approx([-0.020581, -0.169846], abs=1e-6)


def test_top_p_keeps_the_token_that_reaches_the_mass_and_renormalises():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert keep(logits.tolist(), top_p=0.9) == [0, 1, 2]
    mask = torch.tensor([[True, True, True, False]])
    row = processed_log_softmax(logits[None], torch.ones(1), mask)[0]
    assert row[:3].tolist() == pytest.approx([-0.641854, -1.152680, -1.845827], abs=1e-6)
    assert row[3] == -torch.inf


def test_a_recorded_set_is_replayed_where_the_trainers_own_would_lack_the_token():
    logits = torch.tensor([[0.6, 0.31, 0.07, 0.02]]).log()
    assert keep(logits[0].tolist(), top_p=0.9) == [0, 1]
    logprobs, _ = score(logits, [2], [1.0], kept=([0, 1, 2], [0, 3]))
    assert logprobs.item() == pytest.approx(-2.639057, abs=1e-6)


def test_kept_set_logprob_and_gradient():
    logits = torch.tensor([[2.0, 0.5, 1.0, -1.0, 0.0]], requires_grad=True)
    logprobs, _ = score(logits, [2], [1.0], kept=([0, 2, 4], [0, 3]))
    logprobs.sum().backward()
    assert logprobs.item() == pytest.approx(-1.407606, abs=1e-6)
    assert logits.grad is not None
    assert logits.grad[0].tolist() == pytest.approx([-0.665241, 0, 0.755272, 0, -0.090031], abs=1e-6)
    assert logits.grad[0, [1, 3]].tolist() == [0.0, 0.0]


def test_a_single_kept_token_has_logprob_and_gradient_of_exactly_zero():
    logits = torch.tensor([[6.0, 0.0, 0.0]], requires_grad=True)
    assert keep(logits[0].tolist(), top_p=0.95) == [0]
    logprobs, _ = score(logits, [0], [1.0], kept=([0], [0, 1]))
    logprobs.sum().backward()
    assert logprobs.item() == 0.0
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.0, 0.0, 0.0]]


def test_a_tokens_logprob_comes_from_the_token_before_it():
    table = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]])
    config = config_of(3, width=3, num_layers=0, tie_embeddings=False, rms_norm_eps=1e-12)
    model = Llama(config)
    scaled = table.log().T / 3**0.5  # the norm turns a one-hot row of three into sqrt(3)
    model.load_weights(
        {"model.embed_tokens.weight": torch.eye(3), "model.norm.weight": torch.ones(3), "lm_head.weight": scaled}
    )
    ids = torch.tensor([0, 1, 2, 2])
    hidden = model(ids, torch.arange(4), lambda layer, q, k, v: q)
    logprobs, _ = token_logprobs(hidden[:-1], model.head_weight, config, ids[1:], torch.ones(3), None, Numerics.FAST)
    assert logprobs.tolist() == pytest.approx([-1.609438, -1.203973, -0.693147], abs=1e-5)


@pytest.mark.parametrize("numerics", Numerics)
def test_rows_of_the_padded_vocabulary_have_probability_zero(numerics: Numerics):
    torch.manual_seed(0)
    config = config_of(10, padded=12)
    logits = logits_of(torch.randn(5, 8), torch.randn(12, 8) * 3, config, numerics)
    assert logits.dtype == torch.float32
    probabilities = processed_log_softmax(logits, torch.ones(5), None).exp()
    assert probabilities[:, 10:].eq(0).all()
    assert torch.allclose(probabilities.sum(-1), torch.ones(5))
    assert not truncate(logits, torch.ones(5), torch.zeros(5, dtype=torch.long), torch.ones(5))[:, 10:].any()


def test_equal_probabilities_keep_the_lower_id_first():
    assert keep([0.0, 0.0, 0.0, 0.0], top_k=2) == [0, 1]
    assert keep([0.0, 1.0, 1.0, 0.0], top_p=0.3) == [1]


def test_top_p_counts_mass_among_the_top_k_at_the_temperature():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert keep(logits, top_k=2, top_p=0.55) == [0]  # 4/7 of the two reach it, 0.4 of the four would not
    assert keep(logits, temperature=4.0, top_p=0.6) == [0, 1, 2]  # flatter: .287, .268, .242, .203
    assert keep(logits, top_p=0.6) == [0, 1]


def test_top_p_of_one_keeps_every_token_however_small():
    torch.manual_seed(0)
    logits = torch.randn(16, 264) * 8
    mask = truncate(logits, torch.ones(16), torch.zeros(16, dtype=torch.long), torch.ones(16))
    assert mask.all()


def _reference_keep(logits: list[float], temperature: float, top_k: int, top_p: float) -> set[int]:
    z = np.array(logits, np.float64) / temperature
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))[: top_k or None]
    p = np.exp(z[order] - z[order[0]])
    p /= p.sum()
    before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
    if top_p < 1 and np.abs(before - top_p).min() < 1e-5:
        return set()  # a border that float32 may decide either way
    return {i for i, mass in zip(order, before, strict=True) if mass < top_p or top_p >= 1}


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(-12, 12), min_size=7, max_size=7), min_size=1, max_size=5),
    temperature=st.floats(0.3, 2.0),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.05, 1.0),
)
def test_truncation_equals_the_plain_rule_row_by_row(rows, temperature, top_k, top_p):
    logits = torch.tensor(rows, dtype=torch.float32) / 2
    size = len(rows)
    mask = truncate(logits, torch.full((size,), temperature), torch.full((size,), top_k), torch.full((size,), top_p))
    assert mask.any(-1).all()
    for row, kept in zip(logits.tolist(), mask, strict=True):
        if expected := _reference_keep(row, temperature, top_k, top_p):
            assert set(kept.nonzero()[:, 0].tolist()) == expected


def test_an_empty_row_of_kept_sets_is_the_full_vocabulary():
    mask = keep_mask(torch.tensor([5, 2, 7, 9, 4], dtype=torch.int32), torch.tensor([0, 1, 4, 4, 5]), 10)
    assert [row.nonzero()[:, 0].tolist() for row in mask] == [[5], [2, 7, 9], list(range(10)), [4]]


def test_a_label_outside_its_kept_set_is_refused_by_its_place():
    logits = torch.zeros(600, 4)
    offsets = [0] * 591 + [2] * 10
    with pytest.raises(ValueError, match=r"token 590 .*lacks its id 3"):
        score(logits, [3] * 600, [1.0] * 600, kept=([0, 1], offsets))


def test_entropy_is_of_the_untruncated_distribution_and_carries_no_gradient():
    logits = torch.tensor([0.5, 0.25, 0.25]).log()[None].requires_grad_()
    logprobs, entropy = score(logits, [0], [1.0], kept=([0], [0, 1]))
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    assert entropy.item() == pytest.approx(1.0397208, abs=1e-6)  # 1.5 ln 2


def _case(
    num_tokens: int, whole_every: int = 3
) -> tuple[LlamaConfig, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(num_tokens)
    config = config_of(37, padded=40, width=16)
    hidden = torch.randn(num_tokens, 16, generator=generator)
    weight = torch.randn(40, 16, generator=generator) / 2
    labels = torch.randint(0, 37, (num_tokens,), generator=generator)
    temperature = torch.rand(num_tokens, generator=generator) + 0.5
    rows = [sorted({int(label), 3, 20, 36}) if (t + 1) % whole_every else [] for t, label in enumerate(labels)]
    offsets = torch.tensor([0, *np.cumsum([len(row) for row in rows])])
    kept = torch.tensor([i for row in rows for i in row], dtype=torch.int32), offsets
    return config, hidden, weight, labels, temperature, kept


def _reference(case: tuple, coefficients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in float64 and in one piece, by torch's own gradient."""
    config, hidden, weight, labels, temperature, (ids, offsets) = case
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    z = (hidden @ weight.T)[:, : config.vocab_size] / temperature.double()[:, None]
    rows = []
    for t in range(len(labels)):
        members = ids[offsets[t] : offsets[t + 1]].long()
        members = members if len(members) else torch.arange(config.vocab_size)
        rows.append(z[t, labels[t]] - z[t, members].logsumexp(-1))
    logprobs = torch.stack(rows)
    (logprobs * coefficients.double()).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return logprobs.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("numerics", Numerics)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 50, 512])
@pytest.mark.parametrize("whole_every", [3, 51], ids=["some rows keep all", "every row has a set"])
def test_chunked_logprobs_and_gradients_equal_one_piece_in_float64(
    whole_every: int, chunk_tokens: int, numerics: Numerics
):
    case = _case(50, whole_every)
    config, hidden, weight, labels, temperature, kept = case
    coefficients = torch.linspace(-1, 1, 50)
    expected, hidden_grad, weight_grad = _reference(case, coefficients)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    logprobs, _ = token_logprobs(hidden, weight, config, labels, temperature, kept, numerics, chunk_tokens)
    (logprobs * coefficients).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    assert torch.allclose(logprobs.double(), expected, atol=2e-6)
    assert torch.allclose(hidden.grad.double(), hidden_grad, rtol=1e-5, atol=2e-6)
    assert torch.allclose(weight.grad.double(), weight_grad, rtol=1e-5, atol=5e-6)
    assert weight.grad[config.vocab_size :].eq(0).all()


def test_ids_that_no_row_keeps_get_no_gradient():
    config, hidden, weight, _, temperature, _ = _case(4)
    weight.requires_grad_()
    kept = torch.tensor([5, 9, 5, 20, 9, 20, 5], dtype=torch.int32), torch.tensor([0, 2, 4, 6, 7])
    labels = torch.tensor([9, 5, 20, 5])
    logprobs, _ = token_logprobs(hidden, weight, config, labels, temperature, kept, Numerics.FAST)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum(-1).nonzero()[:, 0].tolist() == [5, 9, 20]


def test_no_tokens_give_no_logprobs():
    config, hidden, weight, *_ = _case(4)
    logprobs, entropy = token_logprobs(
        hidden[:0], weight, config, torch.zeros(0, dtype=torch.long), torch.ones(0), None, Numerics.FAST
    )
    assert logprobs.shape == entropy.shape == (0,)


def _peak_bytes(num_tokens: int, chunk_tokens: int, vocab: int = 2048) -> int:
    config = config_of(vocab, width=4)
    hidden, weight = torch.randn(num_tokens, 4, requires_grad=True), torch.randn(vocab, 4, requires_grad=True)
    labels, temperature = torch.zeros(num_tokens, dtype=torch.long), torch.ones(num_tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        logprobs, _ = token_logprobs(hidden, weight, config, labels, temperature, None, Numerics.FAST, chunk_tokens)
        logprobs.sum().backward()
    sizes = [e.nbytes() for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    return int(np.cumsum(sizes).max())


def test_logits_exist_for_one_chunk_at_a_time_forward_and_backward():
    # takes 0.5 s: it runs 4096 tokens by 2048 rows to tell a chunk's memory from the whole
    chunk = 64 * 2048 * 4
    short, long = _peak_bytes(512, 64), _peak_bytes(4096, 64)
    assert chunk < short < 12 * chunk
    assert long < short + 2 * chunk  # eight times the tokens, no more logits
    assert _peak_bytes(4096, 4096) > 5 * long


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    spread=st.floats(0, 4),
    top_k=st.sampled_from([0, 1, 5, 1024, 1500]),
    top_p=st.sampled_from([0.2, 0.95, 0.999, 1.0]),
)
def test_ranking_the_highest_first_keeps_what_sorting_the_whole_row_keeps(seed, spread, top_k, top_p):
    """Rows wider than what is ranked at first, with many equal logits; the reference walks down the sorted row."""
    row = torch.randn(2000, generator=torch.Generator().manual_seed(seed)).mul(spread).mul(8).round().div(8)
    order = row.sort(descending=True, stable=True).indices[: top_k or None]
    mass = row[order].double().softmax(-1)
    before = mass.cumsum(-1) - mass
    kept = set(keep(row.tolist(), top_k=top_k, top_p=top_p))
    if top_p == 1:
        assert kept == set(order.tolist())
    else:
        clear = (before - top_p).abs() > 1e-4  # where rounding cannot decide
        expected = set(order[(before < top_p) & clear].tolist())
        assert expected <= kept
        assert not kept & set(order[(before >= top_p) & clear].tolist())
        assert kept == set(row.sort(descending=True, stable=True).indices[: len(kept)].tolist())
