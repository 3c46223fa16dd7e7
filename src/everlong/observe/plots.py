"""Curves from a metrics file, as a PNG; needs no display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from everlong.observe.sinks import read_points

COLUMNS = 2


class Curve:
    """One metric of one axis: the last value written for each step, in the order of the steps."""

    def __init__(self, axis: str, name: str) -> None:
        self.axis, self.name = axis, name
        self._values: dict[int, float] = {}

    def add(self, step: int, value: float) -> None:
        self._values[step] = value

    @property
    def steps(self) -> list[int]:
        return sorted(self._values)

    @property
    def values(self) -> list[float]:
        return [self._values[step] for step in self.steps]


def read_curves(jsonl: str | Path, metrics: Sequence[str] | None = None) -> list[Curve]:
    """One curve per axis and metric that has a finite value; `metrics` names the wanted ones, None takes all."""
    curves: dict[tuple[str, str], Curve] = {}
    for point in read_points(jsonl):
        for name, value in point.values.items():
            if value is not None and (metrics is None or name in metrics):
                curves.setdefault((point.axis, name), Curve(point.axis, name)).add(point.step, value)
    return [curves[key] for key in sorted(curves)]


def plot_curves(jsonl: str | Path, out_png: str | Path, metrics: Sequence[str] | None = None) -> None:
    """One small plot per axis and metric. Raises ValueError where there is nothing to plot."""
    # Only here: importing pyplot takes longer than everything else in this room together.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    curves = read_curves(jsonl, metrics)
    if not curves:
        wanted = "any metric" if metrics is None else " or ".join(metrics)
        raise ValueError(f"{jsonl} has no point of {wanted}: nothing to plot")
    columns = min(COLUMNS, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(4.5 * columns, 2.8 * rows), layout="constrained")
    for place, curve in enumerate(curves, start=1):
        axes = figure.add_subplot(rows, columns, place)
        axes.plot(curve.steps, curve.values, linewidth=1.4, marker="o", markersize=2)
        axes.set_title(curve.name, fontsize=10)
        axes.set_xlabel(curve.axis, fontsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(out_png, dpi=110, format="png")
