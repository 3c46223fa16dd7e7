"""The column of a network's decisions: what it carries goes where its tokens go, and absent is absent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlong.contracts.decisions import Decisions, DecisionShape, absent_rows
from everlong.contracts.records import FinishReason, GenerateReply, decode_record, encode_record
from everlong.contracts.tokens import TokenColumns

SHAPE = DecisionShape(places=2, width=2, num_choices=8)
ROWS = np.uint8([[[3, 0], [1, 2]], [[7, 6], [5, 4]], [[0, 1], [2, 3]]])


def decided(rows=ROWS):
    return Decisions(num_tokens=len(rows), rows={"experts": rows})


def test_a_choice_costs_one_byte_where_there_are_few_and_two_where_there_are_many():
    assert absent_rows(3, SHAPE).dtype == np.uint8 and decided().size_bytes == 3 * 2 * 2
    assert DecisionShape(6, 2, 255).dtype == "uint8" and DecisionShape(6, 2, 256).dtype == "uint16"
    assert absent_rows(3, DecisionShape(6, 2, None)).dtype == np.float32
    assert Decisions(num_tokens=1000).size_bytes == 0


def test_a_token_without_record_is_absent_beside_those_with_one():
    joined = Decisions.join([Decisions(num_tokens=2), decided(), Decisions(num_tokens=1)])
    assert joined.known("experts").tolist() == [False, False, True, True, True, False]
    assert (joined.rows["experts"][:2] == 255).all()
    assert joined.known("other").tolist() == [False] * 6


def test_rows_are_cut_and_joined_with_their_tokens():
    columns = TokenColumns.context([1, 2, 3], decided())
    assert columns.slice(1, 3).decisions.rows["experts"].tolist() == ROWS[1:].tolist()
    assert columns.slice(0, 1) + columns.slice(1, 3) == columns
    padded, _ = columns.pad(5, pad_id=0)
    assert padded.decisions.known("experts").tolist() == [True, True, True, False, False]
    assert columns.freeze().decisions == columns.decisions == columns.with_credit(1.0).decisions
    other = TokenColumns.context([1, 2, 3], decided(ROWS[::-1].copy()))
    assert columns != other and columns != TokenColumns.context([1, 2, 3])


def test_rows_out_of_step_with_their_tokens_are_refused():
    with pytest.raises(ValueError, match=r"rows of shape \[3, 2, 2\] for 4 tokens"):
        TokenColumns.context([1, 2, 3, 4], Decisions(num_tokens=4, rows={"experts": ROWS}))
    with pytest.raises(ValueError, match="length of the ids"):
        TokenColumns.context([1, 2], decided())
    with pytest.raises(ValueError, match="is int64: expected one of uint8"):
        TokenColumns.context([1, 2, 3], decided(ROWS.astype(np.int64)))


def test_records_of_two_models_do_not_join():
    with pytest.raises(ValueError, match=r"uint8\[1, 2\] per token here and uint8\[2, 2\] there|two different models"):
        Decisions.join([decided(), decided(ROWS[:, :1].copy())])


def test_a_record_that_is_older_than_the_column_has_none():
    columns = TokenColumns.context([1, 2, 3])
    assert len(columns.decisions) == 3 and columns.decisions.rows == {}


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=6), st.integers(0, 20), st.integers(0, 20))
def test_any_joining_and_cutting_keeps_each_row_at_its_token(parts, start, stop):
    columns, expected = TokenColumns.empty(), []
    for number, (length, recorded) in enumerate(parts):
        rows = np.full((length, 2, 2), number, np.uint8)
        decisions = Decisions(num_tokens=length, rows={"experts": rows} if recorded else {})
        columns += TokenColumns.context([number] * length, decisions)
        expected += [number if recorded else 255] * length
    columns, expected = columns.slice(start, stop), expected[start:stop]
    rows = columns.decisions.rows.get("experts", np.full((len(columns), 2, 2), 255, np.uint8))
    assert rows[:, 0, 0].tolist() == expected
    assert decode_record(encode_record(columns), TokenColumns) == columns


def test_a_reply_carries_them_over_the_wire():
    sampled = TokenColumns.sampled_tokens([5, 6, 7], [-1.0] * 3, version=0, decisions=decided())
    reply = GenerateReply(request_id="a", columns=sampled, context=decided(ROWS[:2]), finish_reason=FinishReason.STOP)
    again = decode_record(encode_record(reply), GenerateReply)
    assert again.columns == sampled
    assert again.context.rows["experts"].tolist() == ROWS[:2].tolist()
