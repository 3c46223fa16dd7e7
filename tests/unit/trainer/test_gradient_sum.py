"""The sum of gradients depends on the index of each, never on when it came."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everlong.trainer.gradient_sum import GradientSum


def gradients(count):
    generator = torch.Generator().manual_seed(count)
    return [[torch.randn(3, 5, generator=generator), torch.randn(7, generator=generator)] for _ in range(count)]


def summed(parts, order):
    total = GradientSum()
    for index in order:
        part = parts[index]
        total.push(index, None if part is None else [tensor.clone() for tensor in part])
    return total.close(len(parts))


@given(st.integers(1, 20).flatmap(lambda n: st.permutations(range(n))))
def test_any_order_of_arrival_gives_the_same_bits(order):
    parts = gradients(len(order))
    for got, expected in zip(summed(parts, order), summed(parts, range(len(parts))), strict=True):
        assert torch.equal(got, expected)


def test_the_tree_is_the_balanced_one():
    big, small = torch.tensor([1.0]), torch.tensor([2.0**-24])
    parts = [[big], [small], [small], [small]]
    # one after the other, each small part is rounded away
    assert summed(parts, [0, 1, 2, 3])[0].item() == 1.0 + 2.0**-23
    assert (big + small + small + small).item() == 1.0


def test_the_sum_is_the_sum():
    parts = gradients(13)
    for i, got in enumerate(summed(parts, range(13))):
        torch.testing.assert_close(got, torch.stack([part[i] for part in parts]).double().sum(0).float())


def test_in_order_it_holds_few_gradients():
    total = GradientSum()
    for index, part in enumerate(gradients(100)):
        total.push(index, part)
        assert len(total._nodes) <= 7


def test_a_micro_batch_without_gradient_counts_as_zero():
    parts = gradients(3)
    for got, expected in zip(summed([*parts, None, None], range(5)), summed(parts, range(3)), strict=True):
        torch.testing.assert_close(got, expected)
    assert summed([None, None, None], range(3)) is None


@pytest.mark.parametrize("pushed", [[0, 1], [0, 2, 3], [0, 1, 3]], ids=["one missing", "a wrong index", "a gap"])
def test_a_missing_micro_batch_is_refused(pushed):
    total = GradientSum()
    for index in pushed:
        total.push(index, [torch.zeros(1)])
    with pytest.raises(ValueError, match="expected the gradients of micro-batches 0 to 2"):
        total.close(3)
