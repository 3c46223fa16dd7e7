"""Two sides of a comparison, timed in turn, so that whatever else the machine does hits both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


def interleaved(
    ours: Callable[[], object],
    reference: Callable[[], object],
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Median seconds of each side over `repeats` turns, after one turn each that is not counted. `clock` may count the
    processor's time alone."""
    ours()
    reference()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for side, kept in zip((ours, reference), seconds, strict=True):
            started = clock()
            side()
            kept.append(clock() - started)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


@dataclass(frozen=True, slots=True)
class Spent:
    """What a piece of work took."""

    seconds: float
    cpu_seconds: float
    """Of all threads of the process: what others do on the machine hardly enters it."""


class Stopwatch:
    def __init__(self) -> None:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def read(self) -> Spent:
        return Spent(time.perf_counter() - self._began, time.process_time() - self._cpu_began)
