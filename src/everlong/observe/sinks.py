"""Where measured points go. Every point is kept under its own axis and step, however late it comes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import msgspec

from everlong.contracts.ports import MetricSink
from everlong.contracts.records import Record

SECONDS = "seconds/"
"""Names of timings begin with this."""


class Point(Record, frozen=True, kw_only=True):
    """Values of one step of one axis.

    Example: Point(axis="batch", step=249, values={"reward": 0.5}, written_s=1760000000.0)
    """

    axis: str
    """What `step` counts."""
    step: int
    values: dict[str, float | None]
    """None where it was not a finite number."""
    written_s: float
    """Seconds since the epoch."""


class MemorySink:
    """Keeps the points, for tests and for code that reads them back."""

    def __init__(self) -> None:
        self.points: list[Point] = []

    def log(self, axis: str, step: int, values: dict[str, float]) -> None:
        self.points.append(_point(axis, step, values))

    def close(self) -> None:
        """The points stay."""


class JsonlSink:
    """Appends one line per point. A killed writer leaves at most one half line, which readers skip and nobody joins."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")

    def log(self, axis: str, step: int, values: dict[str, float]) -> None:
        line = msgspec.json.encode(_point(axis, step, values)) + b"\n"
        while line:
            line = line[os.write(self._file, line) :]

    def close(self) -> None:
        """Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class FanOut:
    """Logs to every sink. One that fails does not keep a point from the others; its error is raised afterwards."""

    def __init__(self, *sinks: MetricSink) -> None:
        self._sinks = sinks

    def log(self, axis: str, step: int, values: dict[str, float]) -> None:
        _each(lambda sink: sink.log(axis, step, values), self._sinks)

    def close(self) -> None:
        _each(lambda sink: sink.close(), self._sinks)


def read_points(path: str | Path) -> list[Point]:
    """Every whole line, in the order of writing; half lines are skipped. An absent file has no points."""
    path = Path(path)
    if not path.exists():
        return []
    points = []
    for line in path.read_bytes().splitlines():
        try:
            points.append(msgspec.json.decode(line, type=Point))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return points


def read_rows(points: Iterable[Point], axis: str) -> dict[int, dict[str, float | None]]:
    """One row per step of an axis. A batch that was trained again after a crash was written twice.

    Of what both say the later counts, since the weights come from it, except how long something took: the batch was sampled,
    and its parts were timed together, once. What only one of them measured stays.
    """
    rows: dict[int, dict[str, float | None]] = {}
    for point in points:
        if point.axis == axis:
            row = rows.setdefault(point.step, {})
            row |= {name: value for name, value in point.values.items() if not _stays(name, row, value)}
    return rows


def _stays(name: str, row: Mapping[str, float | None], again: float | None) -> bool:
    """Whether what the row holds by this name is kept although it is said again."""
    return row.get(name) is not None and (again is None or name.startswith(SECONDS))


def _point(axis: str, step: int, values: dict[str, float]) -> Point:
    finite = {name: float(value) if math.isfinite(value) else None for name, value in values.items()}
    return Point(axis=axis, step=int(step), values=finite, written_s=time.time())


def _each(act: Callable[[MetricSink], None], sinks: Iterable[MetricSink]) -> None:
    errors = []
    for sink in sinks:
        try:
            act(sink)
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
