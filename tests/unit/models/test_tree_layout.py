"""A layout's calls say who sees whom: nobody sees another branch, and few calls see much."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.models.forests import forests, path_of

from everlong.models.attention import KeyMemory, _products
from everlong.models.tree_layout import Call, Chain, lay_out
from everlong.models.tree_pass import parts_of


def seen(num_queries, products):
    """Per query the keys that the calls give it, each as often as they do."""
    found = [[] for _ in range(num_queries)]
    for queries, keys, is_causal in products:
        for at, query in enumerate(range(*queries)):
            found[query] += range(keys[0], keys[0] + at + 1) if is_causal else range(*keys)
    return found


@settings(max_examples=200, deadline=None)
@given(forests())
def test_every_token_sees_its_path_and_nothing_twice(segments):
    layout = lay_out(segments)
    total = sum(length for _, _, length in segments)
    assert sorted(layout.order.tolist()) == list(range(total))
    assert np.array_equal(layout.order[layout.place], np.arange(total))
    found = seen(total, [(call.queries, call.keys, call.is_causal) for call in layout.calls])
    for index, (_, start, length) in enumerate(segments):
        path = path_of(segments, index)
        for token in range(start, start + length):
            keys = layout.order[found[layout.place[token]]].tolist()
            assert sorted(keys) == sorted(path[: len(path) - (start + length - token) + 1])


@settings(max_examples=100, deadline=None)
@given(forests())
def test_a_path_crosses_few_chains_and_a_fork_is_one_call(segments):
    layout = lay_out(segments)
    total = len(layout.order)
    assert all(len(chain.above) <= math.log2(total) for chain in layout.chains)
    leaves = sum(1 for i in range(len(segments)) if not any(parent == i for parent, _, _ in segments))
    assert len(layout.chains) <= leaves
    assert len(layout.calls) <= len(layout.chains) + len(segments)


def test_a_trunk_with_a_leaf_at_every_turn_is_one_run_of_keys():
    """The thinking of every turn is dropped from the next prompt. Leaves come first in the record."""
    segments = [(-1, 0, 4), (0, 4, 2), (0, 6, 4), (2, 10, 2), (2, 12, 4), (4, 16, 2), (4, 18, 4)]
    layout = lay_out(segments)
    assert layout.order.tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15, 18, 19, 20, 21, 16, 17, 10, 11, 4, 5]
    assert layout.chains == (
        Chain(0, 16, ()),
        Chain(16, 18, ((0, 12),)),
        Chain(18, 20, ((0, 8),)),
        Chain(20, 22, ((0, 4),)),
    )
    assert set(layout.calls[4:]) == {Call((16, 18), (0, 12)), Call((18, 20), (0, 8)), Call((20, 22), (0, 4))}


def test_answers_to_one_prompt_share_one_call():
    layout = lay_out([(-1, 0, 5), (0, 5, 3), (0, 8, 3), (0, 11, 3)])
    assert layout.is_identity
    assert [call for call in layout.calls if not call.is_causal] == [Call((8, 14), (0, 5))]


@settings(max_examples=200, deadline=None)
@given(forests(), st.integers(1, 40))
def test_parts_see_what_the_whole_sees_and_hold_nothing_else(segments, limit):
    layout = lay_out(segments)
    total = len(layout.order)
    parts = parts_of(total, limit)
    memory = KeyMemory(layout, parts)
    held = [place for part in parts for place in np.arange(*part)[memory.seen_later(part).numpy()].tolist()]
    assert len(held) == memory.num_held
    whole = seen(total, [(call.queries, call.keys, call.is_causal) for call in layout.calls])
    for start, stop in parts:
        pairs = []
        for product in _products(layout.calls, (start, stop), memory):
            keys, lowest = product.keys, 0 if product.is_before else start
            pairs.append((product, range(lowest + keys.start, lowest + keys.stop)))
        found = [[] for _ in range(stop - start)]
        for product, keys in pairs:
            keys = [held[key] for key in keys] if product.is_before else list(keys)
            for at, query in enumerate(range(product.queries.start, product.queries.stop)):
                found[query] += keys[: at + 1] if product.is_causal else keys
        assert [sorted(keys) for keys in found] == [sorted(keys) for keys in whole[start:stop]]
    needed = {key for (_, stop) in parts for query in range(stop, total) for key in whole[query] if key < stop}
    assert set(held) == needed
