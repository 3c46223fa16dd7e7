"""Who computes which micro-batch, which nodes of the sum's tree that makes, and who owns which tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everlong.trainer.gradient_sum import GradientSum
from everlong.trainer.ranks.ranks import nodes_of, owners_of, shares


@given(st.integers(0, 40), st.integers(1, 9))
def test_every_micro_batch_is_one_rank_s_and_shares_differ_by_one_at_most(num_micro_batches, num_ranks):
    found = shares(num_micro_batches, num_ranks)
    assert [index for share in found for index in share] == list(range(num_micro_batches))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@given(st.integers(0, 40), st.integers(0, 40))
def test_nodes_are_those_that_the_sum_of_a_share_holds(start, length):
    total = GradientSum()
    for index in range(start, start + length):
        total.push(index, [torch.zeros(1)])
    assert set(nodes_of(range(start, start + length))) == total.nodes.keys()


@given(st.integers(1, 30), st.integers(1, 6), st.data())
def test_nodes_of_all_shares_give_the_bits_of_the_whole_sum_in_any_order(num_micro_batches, num_ranks, data):
    generator = torch.Generator().manual_seed(num_micro_batches)
    parts = [torch.randn(5, generator=generator) for _ in range(num_micro_batches)]
    whole = GradientSum()
    for index, part in enumerate(parts):
        whole.push(index, [part.clone()])
    nodes = []
    for share in shares(num_micro_batches, num_ranks):
        own = GradientSum()
        for index in share:
            own.push(index, [parts[index].clone()])
        nodes += own.nodes.items()
    together = GradientSum()
    for (level, index), gradient in data.draw(st.permutations(nodes)):
        together.push(index, gradient, level)
    assert torch.equal(together.close(num_micro_batches)[0], whole.close(num_micro_batches)[0])


def test_a_node_that_is_missing_is_refused():
    total = GradientSum()
    total.push(0, [torch.zeros(1)], 2)
    with pytest.raises(ValueError, match="0 to 5"):
        total.close(6)


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 5))
def test_tensors_are_shared_out_whole_and_about_evenly(sizes, num_ranks):
    owners = owners_of(sizes, num_ranks)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(num_ranks)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) <= max(sizes, default=0)
