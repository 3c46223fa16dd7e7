"""Metrics reduce the same however their parts are grouped."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlong.observe import Metrics, Reduce

NUMBERS = st.integers(-1000, 1000).map(float)  # sums of these are exact


def one(reduce: Reduce, value: float, weight: float) -> Metrics:
    metrics = Metrics()
    metrics.add("m", value, weight if reduce is Reduce.MEAN else 1.0, reduce)
    return metrics


@given(st.sampled_from(list(Reduce)), st.lists(st.tuples(NUMBERS, NUMBERS.map(abs)), min_size=3, max_size=9), st.data())
def test_merging_is_associative(reduce: Reduce, values: list[tuple[float, float]], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), min_size=2, max_size=2)))
    parts = [one(reduce, value, weight) for value, weight in values]
    groups = [parts[: cuts[0]], parts[cuts[0] : cuts[1]], parts[cuts[1] :]]
    assert Metrics.join(Metrics.join(group) for group in groups).values() == Metrics.join(parts).values()


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [(Reduce.SUM, 6.0), (Reduce.MEAN, 2.0), (Reduce.MAX, 3.0), (Reduce.MIN, 1.0), (Reduce.LAST, 2.0)],
)
def test_each_reduction(reduce: Reduce, expected: float) -> None:
    metrics = Metrics()
    for value in (3.0, 1.0, 2.0):
        metrics.add("m", value, reduce=reduce)
    assert metrics.values() == {"m": expected}


def test_mean_weighs_by_count_so_a_batch_may_be_cut_anywhere() -> None:
    metrics = Metrics()
    metrics.add("loss", 1.0, weight=2)
    metrics.add("loss", 4.0, weight=1)
    assert metrics.values() == {"loss": 2.0}


def test_mean_over_nothing_is_absent_not_zero() -> None:
    metrics = Metrics()
    metrics.add("loss", math.nan, weight=0)
    assert metrics.values() == {}
    metrics.add("loss", 3.0, weight=4)
    assert metrics.values() == {"loss": 3.0}


@pytest.mark.parametrize("reduce", [Reduce.SUM, Reduce.MEAN, Reduce.MAX, Reduce.MIN])
@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_stays_visible(reduce: Reduce, values: tuple[float, float]) -> None:
    metrics = Metrics()
    for value in values:
        metrics.add("m", value, reduce=reduce)
    assert math.isnan(metrics.values()["m"])


def test_one_name_reduces_one_way() -> None:
    metrics = Metrics()
    metrics.add("tokens", 3, reduce=Reduce.SUM)
    with pytest.raises(ValueError, match="metric tokens: cannot merge a sum with a max"):
        metrics.add("tokens", 3, reduce=Reduce.MAX)


def test_weight_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match="metric tokens is a sum: a weight of 2 would have no effect"):
        Metrics().add("tokens", 3, weight=2, reduce=Reduce.SUM)
    with pytest.raises(ValueError, match="negative weight"):
        Metrics().add("loss", 3, weight=-1)
