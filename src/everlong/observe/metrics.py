"""Metrics that know how to reduce: merging parts in any grouping gives what measuring the whole gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from enum import StrEnum

from everlong.contracts.records import Record


class Reduce(StrEnum):
    SUM = "sum"
    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    LAST = "last"
    """The newest by order of merging."""


class Measure(Record, frozen=True, kw_only=True):
    """One metric so far: enough to merge, not only the number to show.

    Example: a mean of 2.0 over 3 tokens is Measure(reduce=Reduce.MEAN, total=6.0, weight=3.0)
    """

    reduce: Reduce
    total: float
    weight: float = 1.0
    """Of a mean: what the total is divided by."""

    @property
    def value(self) -> float | None:
        """None for a mean over nothing: absent, not 0."""
        if self.reduce is not Reduce.MEAN:
            return self.total
        return self.total / self.weight if self.weight else None

    def merge(self, later: Measure) -> Measure:
        """Raises ValueError where the two reduce differently."""
        if later.reduce is not self.reduce:
            raise ValueError(
                f"cannot merge a {self.reduce} with a {later.reduce}: give the two metrics different names"
            )
        match self.reduce:
            case Reduce.SUM | Reduce.MEAN:
                return Measure(reduce=self.reduce, total=self.total + later.total, weight=self.weight + later.weight)
            case Reduce.LAST:
                return later
        # A NaN must stay visible; min and max would drop it depending on the order.
        if math.isnan(self.total) or math.isnan(later.total):
            return Measure(reduce=self.reduce, total=math.nan)
        pick = max if self.reduce is Reduce.MAX else min
        return Measure(reduce=self.reduce, total=pick(self.total, later.total))


class Metrics:
    """Named measures of one step, filled from many places.

    Example: metrics.add("loss", 1.2, weight=512); metrics.add("tokens", 512, reduce=Reduce.SUM)
    """

    def __init__(self, measures: Mapping[str, Measure] | None = None) -> None:
        self._measures = dict(measures or {})

    def add(self, name: str, value: float, weight: float = 1.0, reduce: Reduce = Reduce.MEAN) -> None:
        """Raises ValueError for a weight on anything but a mean, and for a name that reduces differently so far."""
        if reduce is not Reduce.MEAN and weight != 1.0:
            raise ValueError(f"metric {name} is a {reduce}: a weight of {weight} would have no effect")
        if weight < 0:
            raise ValueError(f"metric {name} has the negative weight {weight}")
        # A value without weight is no value: 0 * NaN must not poison the mean.
        total = (value * weight if weight else 0.0) if reduce is Reduce.MEAN else value
        self._merge(name, Measure(reduce=reduce, total=float(total), weight=float(weight)))

    def merge(self, later: Metrics) -> None:
        for name, measure in later._measures.items():
            self._merge(name, measure)

    def _merge(self, name: str, measure: Measure) -> None:
        known = self._measures.get(name)
        try:
            self._measures[name] = measure if known is None else known.merge(measure)
        except ValueError as error:
            raise ValueError(f"metric {name}: {error}") from error

    @property
    def measures(self) -> Mapping[str, Measure]:
        return self._measures

    def values(self) -> dict[str, float]:
        """What to log, by name; means over nothing are left out."""
        return {name: m.value for name, m in sorted(self._measures.items()) if m.value is not None}

    @staticmethod
    def join(parts: Iterable[Metrics]) -> Metrics:
        joined = Metrics()
        for part in parts:
            joined.merge(part)
        return joined
