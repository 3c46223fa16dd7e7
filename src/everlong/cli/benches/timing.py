"""Two sides of a comparison, timed in turn, so that whatever else the machine does hits both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def interleaved(ours: Callable[[], object], reference: Callable[[], object], repeats: int = 5) -> tuple[float, float]:
    """Median seconds of each side over `repeats` turns, after one turn each that is not counted."""
    ours()
    reference()
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for side, kept in zip((ours, reference), seconds, strict=True):
            started = time.perf_counter()
            side()
            kept.append(time.perf_counter() - started)
    return statistics.median(seconds[0]), statistics.median(seconds[1])
