"""From logits to tokens, against numbers worked out by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everlong.engines.torch_engine.sampler import Draws, draw

P4 = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def draws(uniforms, *, temperature=1.0, top_k=0, top_p=1.0):
    n = len(uniforms)
    return Draws(
        temperatures_N=np.broadcast_to(np.asarray(temperature, float), n),
        top_ks_N=np.broadcast_to(np.asarray(top_k, np.int64), n).copy(),
        top_ps_N=np.broadcast_to(np.asarray(top_p, float), n),
        uniforms_N=np.asarray(uniforms, float),
    )


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 0), (0.499, 0), (0.501, 1), (0.799, 1), (0.801, 2), (0.949, 2), (0.951, 3), (1 - 2.0**-52, 3)],
)
def test_a_token_is_drawn_by_the_inverse_of_the_cumulative_distribution_in_id_order(uniform, token):
    drawn = draw(P4[None], draws([uniform]), 4)
    assert drawn.ids_N.tolist() == [token]
    assert drawn.logprobs_N[0] == pytest.approx(float(P4[token]), abs=1e-6)


def test_the_logprob_is_of_the_tempered_distribution():
    drawn = draw(torch.tensor([[2.0, 0.0, -1.0]]), draws([0.0], temperature=0.5), 3)
    assert drawn.logprobs_N[0] == pytest.approx(-0.020581, abs=1e-6)


def test_every_row_has_its_own_temperature():
    logits = torch.tensor([[2.0, 0.0, -1.0]]).repeat(2, 1)
    drawn = draw(logits, draws([0.0, 0.0], temperature=[0.5, 1.0]), 3)
    assert drawn.logprobs_N == pytest.approx([-0.020581, -0.169846], abs=1e-6)


def test_top_p_renormalises_over_the_kept_set_and_records_it():
    drawn = draw(P4.repeat(3, 1), draws([0.1, 0.6, 0.99], top_p=0.9), 4)
    assert drawn.ids_N.tolist() == [0, 1, 2]
    assert drawn.logprobs_N == pytest.approx([-0.641854, -1.152680, -1.845827], abs=1e-6)
    assert drawn.kept.ids.tolist() == [0, 1, 2] * 3
    assert drawn.kept.offsets.tolist() == [0, 3, 6, 9]


def test_the_lowest_number_draws_the_first_id_that_is_kept():
    drawn = draw(torch.tensor([[0.05, 0.5, 0.45]]).log(), draws([0.0], top_p=0.9), 3)
    assert (drawn.ids_N.tolist(), drawn.kept.ids.tolist()) == ([1], [1, 2])


def test_a_kept_set_of_one_has_logprob_exactly_zero():
    drawn = draw(torch.tensor([[6.0, 0.0, 0.0]]), draws([0.7], top_p=0.95), 3)
    assert (drawn.ids_N.tolist(), drawn.logprobs_N.tolist(), drawn.kept.ids.tolist()) == ([0], [0.0], [0])


def test_only_rows_that_truncation_changed_have_a_kept_set():
    drawn = draw(P4.repeat(3, 1), draws([0.1] * 3, top_k=[0, 2, 4], top_p=[1.0, 1.0, 1.0]), 4)
    assert [drawn.kept.row(i).tolist() for i in range(3)] == [[], [0, 1], []]


def test_padded_rows_of_the_vocabulary_are_never_drawn():
    logits = torch.tensor([[0.0] * 10 + [-torch.inf] * 2])
    drawn = draw(logits.repeat(3, 1), draws([0.0, 0.95, 1 - 2.0**-52]), 10)
    assert drawn.ids_N.tolist() == [0, 9, 9]
    assert drawn.logprobs_N == pytest.approx([-2.302585] * 3, abs=1e-6)


def test_logits_that_are_not_finite_are_an_error_and_no_token():
    with pytest.raises(FloatingPointError, match="not finite"):
        draw(torch.tensor([[0.0, torch.nan]]), draws([0.5]), 2)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.lists(st.floats(-20, 20, width=32), min_size=7, max_size=7),
            st.floats(0, 1, exclude_max=True).map(lambda u: min(u, 1 - 2.0**-52)),
            st.sampled_from([0.3, 1.0, 2.0]),
            st.integers(0, 8),
            st.sampled_from([0.1, 0.9, 1.0]),
        ),
        min_size=1,
        max_size=17,
    )
)
def test_a_row_depends_on_no_neighbour_and_its_kept_set_holds_its_token_and_all_the_mass(rows):
    logits, uniforms, temperature, top_k, top_p = (list(column) for column in zip(*rows, strict=True))
    together = draw(torch.tensor(logits), draws(uniforms, temperature=temperature, top_k=top_k, top_p=top_p), 7)
    for i, (row, *how) in enumerate(rows):
        u, t, k, p = how
        alone = draw(torch.tensor([row]), draws([u], temperature=t, top_k=k, top_p=p), 7)
        assert (alone.ids_N[0], alone.logprobs_N[0]) == (together.ids_N[i], together.logprobs_N[i])
        kept = alone.kept.row(0) if alone.kept.ids.size else np.arange(7)
        assert alone.ids_N[0] in kept
        scaled = np.array(row, np.float32)[kept].astype(float) / t
        assert alone.logprobs_N[0] == pytest.approx(
            np.float32(row[alone.ids_N[0]]) / t - np.logaddexp.reduce(scaled), abs=1e-4
        )
