"""Values whose exponents are alike are coded together, where that saves more than a group costs."""

from itertools import pairwise

import numpy as np

from everlong.weights.groups import EXPONENTS, SIZES, WHOLE, Coding, choose_groups


def statistics(*bins: tuple[int, int, list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Of (exponent, values, changes by 1, 2, … ulp)."""
    values, sizes = np.zeros(EXPONENTS, np.int64), np.zeros((EXPONENTS, SIZES), np.int64)
    for exponent, count, changed in bins:
        values[exponent] = count
        sizes[exponent, : len(changed)] = changed
    return values, sizes


def test_exponents_that_change_as_often_are_one_group() -> None:
    alike = statistics((120, 100_000, [1000]), (121, 100_000, [1000]), (122, 100_000, [1000]))
    assert choose_groups(*alike) == WHOLE


def test_exponents_that_change_ten_times_as_often_are_a_group_of_their_own() -> None:
    groups = choose_groups(*statistics((118, 100_000, [20_000]), (121, 400_000, [2000]), (122, 400_000, [2000])))
    assert [group.bound for group in groups] in ([119, 0], [120, 0], [121, 0])
    assert groups[0].coding is Coding.AMONG_ALL, "nearly all are of the outermost: no need to tell them from the others"


def test_a_few_changes_are_not_worth_a_second_group() -> None:
    assert choose_groups(*statistics((118, 100, [20]), (122, 900, [10]))) == WHOLE


def test_where_all_changed_each_value_has_a_step() -> None:
    groups = choose_groups(*statistics((110, 50_000, [10_000, 20_000, 20_000]), (122, 900_000, [2000])))
    assert groups[-1].bound == 0 and groups[-1].coding is Coding.EVERY
    assert groups[0].coding is not Coding.EVERY


def test_bounds_descend_to_zero_for_any_statistics() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = rng.integers(0, 10_000, EXPONENTS) * (rng.random(EXPONENTS) < 0.2)
        sizes = rng.integers(0, 1000, (EXPONENTS, SIZES)) * (rng.random((EXPONENTS, 1)) < 0.2)
        bounds = [EXPONENTS, *(group.bound for group in choose_groups(values, sizes))]
        assert bounds[-1] == 0 and all(inner < outer for outer, inner in pairwise(bounds))


def test_nothing_to_go_by_is_one_group() -> None:
    assert choose_groups(*statistics()) == WHOLE
