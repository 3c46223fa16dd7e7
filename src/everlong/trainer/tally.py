"""Metrics of a batch, gathered over its micro-batches and updates. What was not measured is absent, never 0."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

from torch import Tensor


class Tally:
    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._highest: dict[str, float] = {}
        self._totals: dict[str, float] = defaultdict(float)

    def mean(self, name: str, values: Tensor | float) -> None:
        """The metric will be the mean over all values given under the name."""
        if isinstance(values, Tensor):
            if values.numel():
                self._sums[name] += float(values.detach().double().sum())
                self._counts[name] += values.numel()
        else:
            self._sums[name] += values
            self._counts[name] += 1

    def highest(self, name: str, values: Tensor) -> None:
        if values.numel():
            self._highest[name] = max(float(values.detach().max()), self._highest.get(name, float("-inf")))

    def total(self, name: str, value: float) -> None:
        self._totals[name] += value

    def add(self, other: Tally) -> None:
        """As if what was given to the other had been given to this one."""
        for name, value in other._sums.items():
            self._sums[name] += value
            self._counts[name] += other._counts[name]
        for name, value in other._totals.items():
            self._totals[name] += value
        for name, value in other._highest.items():
            self._highest[name] = max(value, self._highest.get(name, float("-inf")))

    @contextmanager
    def seconds(self, phase: str) -> Generator[None]:
        started = time.perf_counter()
        yield
        self.total(f"seconds/{phase}", time.perf_counter() - started)

    def metrics(self) -> dict[str, float]:
        means = {name: total / self._counts[name] for name, total in self._sums.items()}
        return {**means, **self._highest, **self._totals}
