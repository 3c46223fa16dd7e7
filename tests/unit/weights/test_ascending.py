"""Ascending numbers come back as they were, in little more than their entropy, and damage is refused."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everlong.weights.ascending import EMPTY, Ascending, decode_ascending, encode_ascending


def numbers_of(members: list[int] | np.ndarray) -> np.ndarray:
    return np.array(sorted(members), np.int64)


def bits(record: Ascending) -> int:
    return 8 * (len(record.high) + len(record.low))


def test_two_numbers_as_worked_out_by_hand() -> None:
    """Gaps 0 and 3 with one low bit: unary 0 and 1 are 1 01, the low bits are 0 1."""
    assert decode_ascending(Ascending(2, 1, b"\xa0", b"\x40"), 5).tolist() == [0, 4]
    assert encode_ascending(numbers_of([0, 1, 2])) == Ascending(3, 0, b"\xe0", b"")


@given(st.sets(st.integers(0, 5000), max_size=200), st.integers(0, 10**10))
@settings(max_examples=200, deadline=None)
def test_any_set_comes_back(members: set[int], further: int) -> None:
    for numbers in (numbers_of(list(members)), numbers_of([n * further // 5000 for n in members])):
        numbers = np.unique(numbers)
        below = int(numbers[-1]) + 1 if numbers.size else 0
        assert np.array_equal(decode_ascending(encode_ascending(numbers), below), numbers)


@pytest.mark.parametrize("share", [0.0003, 0.003, 0.01, 0.05, 0.2, 0.45])
def test_independent_positions_cost_less_than_a_twentieth_over_their_entropy(share: float) -> None:
    numbers = np.flatnonzero(np.random.default_rng(0).random(400_000) < share)
    chance = numbers.size / 400_000
    entropy = -400_000 * (chance * np.log2(chance) + (1 - chance) * np.log2(1 - chance))
    assert entropy <= bits(encode_ascending(numbers)) <= 1.05 * entropy + 100


def test_all_numbers_cost_a_bit_each() -> None:
    assert bits(encode_ascending(np.arange(8000))) == 8000


def test_number_that_is_not_below_the_limit_is_refused() -> None:
    record = encode_ascending(numbers_of([3, 900]))
    assert decode_ascending(record, 901).tolist() == [3, 900]
    with pytest.raises(ValueError, match="expected numbers below 900, got 900"):
        decode_ascending(record, 900)


@pytest.mark.parametrize(
    "damaged",
    [
        {"count": 3},
        {"count": 1},
        {"count": -2},
        {"low_bits": 40},
        {"low_bits": -1},
        {"low": b""},
        {"low": b"1234"},
        {"high": b""},
        {"high": b"\xff"},
    ],
    ids=str,
)
def test_damaged_record_is_a_value_error(damaged: dict[str, object]) -> None:
    record = encode_ascending(numbers_of([3, 900]))
    with pytest.raises(ValueError):
        decode_ascending(msgspec.structs.replace(record, **damaged), 1000)


def test_nothing_is_nothing() -> None:
    assert encode_ascending(numbers_of([])) == EMPTY
    assert decode_ascending(EMPTY, 0).size == 0
