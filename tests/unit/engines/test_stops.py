"""When a turn ends."""

import pytest

from everlong.contracts.records import SamplingParams
from everlong.engines.stops import StopWatch

TOKEN_BYTES = [b"a", b"b", b"ab", "é".encode()[:1], "é".encode()[1:], b"xSTOPx", b"ST", b"OP", b""]


def first_match(tokens, *, stop_ids=(), stop_strings=()):
    """Index of the token that ends the turn, and what matched."""
    watch = StopWatch(SamplingParams(stop_ids=stop_ids, stop_strings=stop_strings), TOKEN_BYTES)
    for index, token in enumerate(tokens):
        if (match := watch.match(token)) is not None:
            return index, match
    return None


@pytest.mark.parametrize(
    ("tokens", "stops", "expected"),
    [
        pytest.param([0, 1, 0], {"stop_ids": (1,)}, (1, 1), id="stop id"),
        pytest.param([0, 1], {"stop_strings": ("ab",)}, (1, "ab"), id="string over two tokens"),
        pytest.param([0, 6, 8, 7], {"stop_strings": ("STOP",)}, (3, "STOP"), id="string over three tokens, one empty"),
        pytest.param([5], {"stop_strings": ("STOP",)}, (0, "STOP"), id="string within a token"),
        pytest.param([3, 4], {"stop_strings": ("é",)}, (1, "é"), id="character split between tokens"),
        pytest.param([0, 0, 1], {"stop_strings": ("ab",)}, (2, "ab"), id="false start"),
        pytest.param([0, 2], {"stop_strings": ("aba", "aab")}, (1, "aab"), id="one of several"),
        pytest.param([2], {"stop_strings": ("ab", "a")}, (0, "a"), id="the string that ends first"),
        pytest.param([0, 1], {"stop_ids": (1,), "stop_strings": ("ab",)}, (1, 1), id="an id goes before a string"),
        pytest.param([0, 0, 0], {"stop_ids": (1,), "stop_strings": ("b",)}, None, id="no match"),
    ],
)
def test_a_turn_ends_at_the_first_stop(tokens, stops, expected):
    assert first_match(tokens, **stops) == expected
