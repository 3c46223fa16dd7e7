import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlong.contracts.records import decode_record, encode_record
from everlong.contracts.tokens import STREAMS, KeptSets, TokenColumns

PROMPT = TokenColumns.context([20, 21])


def sampled(ids, logprob=-0.1, version=1, kept=None):
    return TokenColumns.sampled_tokens(ids, [logprob] * len(ids), version=version, kept=kept)


def test_tool_text_is_appended_to_the_sampled_ids_and_never_encodes_them_again():
    columns = PROMPT + TokenColumns.sampled_tokens([5, 6], [-0.1, -0.2], version=3) + TokenColumns.context([30])
    assert columns.ids.tolist() == [20, 21, 5, 6, 30]
    assert columns.trainable.tolist() == [False, False, True, True, False]
    np.testing.assert_array_equal(columns.logprobs, np.float32([np.nan, np.nan, -0.1, -0.2, np.nan]))
    assert columns.versions.tolist() == [-1, -1, 3, 3, -1]


def test_turn_separator_is_context_between_two_turns():
    first = TokenColumns.context([90, 1, 40, 91, 10, 90, 2]) + sampled([41, 91])
    bridge = TokenColumns.context([10, 90, 3, 42, 91, 10, 90, 2])
    columns = first + bridge
    assert columns.ids.tolist() == [90, 1, 40, 91, 10, 90, 2, 41, 91, 10, 90, 3, 42, 91, 10, 90, 2]
    assert not columns.trainable[9]


def test_masking_the_old_part_and_resuming_keeps_every_stream_in_step():
    resumed = sampled([1, 2, 3], version=1).freeze() + sampled([4, 5], version=2)
    assert resumed.trainable.tolist() == [False, False, False, True, True]
    assert resumed.versions.tolist() == [1, 1, 1, 2, 2]
    assert np.isfinite(resumed.logprobs).all() and len(resumed) == 5


def test_missing_logprobs_are_refused_and_never_filled():
    with pytest.raises(ValueError, match="3 sampled ids came with 2 logprobs"):
        TokenColumns.sampled_tokens([1, 2, 3], [-0.1, -0.2], version=0)


@pytest.mark.parametrize("logprob", [np.nan, -np.inf, 0.5])
def test_impossible_logprobs_are_refused(logprob):
    with pytest.raises(ValueError, match="finite and at most 0"):
        TokenColumns.sampled_tokens([1, 2], [-0.1, logprob], version=0)


def test_kept_set_that_lacks_its_token_is_refused_by_name():
    kept = KeptSets.from_rows([[5], [], [2, 7, 9]])
    with pytest.raises(ValueError, match="kept set of token 2 lacks the sampled id 4"):
        sampled([5, 1, 4], kept=kept)


def test_streams_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="length of the ids"):
        PROMPT.replace(credit=np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="must be float32"):
        PROMPT.replace(credit=np.zeros(2, np.float64))


def test_padding_follows_from_the_length_even_where_pad_is_the_end_token():
    long = sampled([5, 6, 2]).replace(trainable=np.array([True, False, True]))
    rows = [long.pad(3, pad_id=2), sampled([5, 2]).pad(3, pad_id=2)]
    assert [row.ids.tolist() for row, _ in rows] == [[5, 6, 2], [5, 2, 2]]
    assert [attention.tolist() for _, attention in rows] == [[True, True, True], [True, True, False]]
    assert [row.trainable.tolist() for row, _ in rows] == [[True, False, True], [True, True, False]]


def test_end_token_that_was_not_sampled_is_context_without_logprob():
    columns = sampled([7, 8, 9]) + TokenColumns.context([91])
    assert columns.trainable.tolist() == [True, True, True, False]
    assert np.isnan(columns.logprobs[3]) and columns.num_sampled == 3


def test_kept_sets_are_sparse_rows_with_long_offsets():
    # With int32 offsets this would be 40 bytes; ours are int64, so that a batch may keep more than 2**31 ids.
    kept = KeptSets.from_rows([[5], [2, 7, 9], [], [4]])
    assert kept.ids.tolist() == [5, 2, 7, 9, 4]
    assert kept.offsets.tolist() == [0, 1, 4, 4, 5]
    assert kept.ids.nbytes + kept.offsets.astype(np.int32).nbytes == 40
    assert kept.ids.nbytes + kept.offsets.nbytes == 60


def test_cutting_a_sequence_cuts_its_kept_ids_at_the_same_token():
    kept = KeptSets.from_rows([[5], [2, 7, 9], [], [4]])
    columns = sampled([5, 7, 3, 4], kept=kept)
    assert columns.slice(1, 3).kept.ids.tolist() == [2, 7, 9]
    assert columns.slice(1, 3).kept.offsets.tolist() == [0, 3, 3]
    assert (columns.slice(0, 2) + columns.slice(2, 4)) == columns


def test_logprobs_of_kept_ids_go_where_their_ids_go():
    rows = KeptSets(ids=np.int32([5, 2, 7]), offsets=np.int64([0, 1, 3]), logprobs=np.float32([0.0, -0.5, -0.9]))
    joined = KeptSets.join([KeptSets.empty(2), rows, KeptSets.from_rows([[4]])])
    assert joined.slice(3, 4).logprobs.tolist() == pytest.approx([-0.5, -0.9])
    assert np.isnan(joined.slice(4, 5).logprobs).all(), "absent is absent, never 0"
    assert joined.without_logprobs().logprobs is None and KeptSets.join([KeptSets.empty(1)]).logprobs is None


def test_credit_reaches_each_turns_own_trainable_tokens_only():
    mask = np.array([False, True, True, False])
    first = sampled([1, 2, 3, 4]).replace(trainable=mask).with_credit(0.7)
    last = sampled([1, 2, 3, 4]).replace(trainable=np.array([False, False, False, True])).with_credit(0.7)
    np.testing.assert_array_equal(first.credit, np.float32([np.nan, 0.7, 0.7, np.nan]))
    np.testing.assert_array_equal(last.credit, np.float32([np.nan, np.nan, np.nan, 0.7]))


def test_no_credit_is_not_a_credit_of_zero():
    assert np.isnan(sampled([1]).with_credit(None).credit[0])
    assert sampled([1]).with_credit(0.0).credit[0] == 0.0


def test_supervised_tokens_are_trainable_but_not_sampled():
    columns = TokenColumns.supervised([4, 5])
    assert columns.num_trainable == 2 and columns.num_sampled == 0
    assert np.isnan(columns.logprobs).all() and (columns.versions == -1).all()


@st.composite
def sampled_columns(draw):
    ids = draw(st.lists(st.integers(0, 9), max_size=5))
    rows = [draw(st.sampled_from([[], [i], [i, i + 10]])) for i in ids]
    version, temperature = draw(st.integers(0, 3)), draw(st.sampled_from([0.5, 1.0]))
    logprobs = [draw(st.floats(-9, 0, width=32)) for _ in ids]
    kept = KeptSets.from_rows(rows)
    return TokenColumns.sampled_tokens(ids, logprobs, version=version, temperature=temperature, kept=kept)


operations = st.one_of(
    sampled_columns().map(lambda c: ("append", c)),
    st.lists(st.integers(0, 9), max_size=4).map(lambda ids: ("append", TokenColumns.context(ids))),
    st.just(("mask", None)),
    st.integers(0, 12).map(lambda n: ("truncate", n)),
    st.just(("retry", None)),
    st.floats(-1, 1, width=32).map(lambda c: ("credit", c)),
)


@given(st.lists(operations, max_size=12))
def test_streams_stay_in_step_through_any_sequence_of_operations(steps):
    columns, reference = TokenColumns.empty(), []
    for name, value in steps:
        if name == "append":
            columns, reference = columns + value, reference + value.ids.tolist()
        elif name == "mask":
            columns = columns.freeze()
        elif name == "truncate":
            columns, reference = columns.slice(0, value), reference[:value]
        elif name == "retry":
            columns, reference = TokenColumns.empty(), []
        else:
            columns = columns.with_credit(value)
        assert columns.ids.tolist() == reference
        assert {len(getattr(columns, stream)) for stream in (*STREAMS, "kept")} == {len(reference)}
        assert (
            np.isnan(columns.logprobs[~columns.sampled]).all() and np.isfinite(columns.logprobs[columns.sampled]).all()
        )
        assert all(
            not len(row) or i in row
            for i, row in zip(columns.ids, map(columns.kept.row, range(len(columns))), strict=True)
        )
    assert decode_record(encode_record(columns), TokenColumns) == columns
