"""What a run's points look like as panels, and panels as a PNG; needs no display."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everlong.observe.console import BATCH, EVAL, WARMUP
from everlong.observe.intervals import wilson_interval
from everlong.observe.sinks import Point, read_rows

COLUMNS = 2
AGE_SHARE = "staleness/share/"
"""Names of the shares of trained tokens by age begin with this."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line or row of dots: a value per x, with an interval where one is known."""

    label: str
    values: dict[int, float] = field(default_factory=dict)
    intervals: dict[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def xs(self) -> list[int]:
        return sorted(self.values)

    @property
    def ys(self) -> list[float]:
        return [self.values[x] for x in self.xs]


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    x_label: str
    series: tuple[Series, ...]
    is_share: bool = False
    """From 0 to 1."""


def read_panels(points: Sequence[Point]) -> list[Panel]:
    """Reward and held-out success; warm-up loss; entropy; tokens per second; age, where any token was old: those that were
    measured.

    RL batches count from 1, an evaluation stands at the number of RL batches before it.
    """
    batches, evals = read_rows(points, BATCH), read_rows(points, EVAL)
    warm = {step + 1: values for step, values in batches.items() if values.get(WARMUP)}
    trained = {step + 1 - len(warm): values for step, values in batches.items() if step + 1 not in warm}
    panels = [
        Panel(
            "Reward in training, success on held-out tasks",
            "RL batch",
            (_series("training reward", trained, "reward"), _success(evals)),
            is_share=True,
        ),
        Panel("Warm-up: loss on oracle traces", "warm-up batch", (_series("loss", warm, "loss"),)),
        Panel("Entropy of the policy per token", "RL batch", (_series("entropy, nats", trained, "entropy"),)),
        Panel("Sampled tokens per second", "RL batch", (_series("tokens/s", trained, "tokens_per_s"),)),
        Panel("Trained tokens by age in policy versions", "RL batch", _ages(trained), is_share=True),
    ]
    return [panel for panel in panels if any(series.values for series in panel.series)]


def plot_panels(panels: Sequence[Panel], out_png: str | Path) -> None:
    """All panels in one picture. Raises ValueError where there is none."""
    Path(out_png).write_bytes(draw_panels(panels))


def draw_panels(panels: Sequence[Panel]) -> bytes:
    """A PNG. Raises ValueError where there is nothing to draw."""
    # Only here: importing matplotlib takes longer than everything else in this room together.
    from matplotlib.figure import Figure

    if not panels:
        raise ValueError("there is no point to plot yet: wait for the first batch")
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.2 * rows), layout="constrained")
    for place, panel in enumerate(panels, start=1):
        _draw(panel, figure.add_subplot(rows, columns, place))
    png = io.BytesIO()
    figure.savefig(png, dpi=120, format="png")
    return png.getvalue()


def _draw(panel: Panel, axes) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    for place, series in enumerate(series for series in panel.series if series.values):
        color = f"C{place}"
        axes.plot(series.xs, series.ys, linewidth=1.6, marker="o", markersize=3, color=color, label=series.label)
        known = [x for x in series.xs if x in series.intervals]
        if known:
            low, high = zip(*(series.intervals[x] for x in known), strict=True)
            axes.vlines(known, low, high, linewidth=3, alpha=0.35, color=color)
    axes.set_title(panel.title, fontsize=11)
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(labelsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if panel.is_share:
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.legend(fontsize=9, loc="best", frameon=False)
    else:
        axes.set_ylim(bottom=0)


def _series(label: str, rows: dict[int, dict[str, float | None]], name: str) -> Series:
    found = {x: value for x, values in rows.items() if (value := values.get(name)) is not None}
    return Series(label, found)


def _ages(rows: dict[int, dict[str, float | None]]) -> tuple[Series, ...]:
    """A series per age; none where every token was of the current version."""
    names = sorted({name for values in rows.values() for name in values if name.startswith(AGE_SHARE)})
    if len(names) < 2:
        return ()
    return tuple(_series(f"age {name.removeprefix(AGE_SHARE)}", rows, name) for name in names)


def _success(evals: dict[int, dict[str, float | None]]) -> Series:
    series = _series("held-out success, 95 % interval", evals, "success")
    for x, share in series.values.items():
        if trials := evals[x].get("episodes"):
            series.intervals[x] = wilson_interval(share * trials, trials)
    return series
