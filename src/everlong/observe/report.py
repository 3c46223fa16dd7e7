"""A run as one HTML file that needs nothing else: styles inline, pictures inside, no request to anywhere."""

from __future__ import annotations

import base64
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from everlong.contracts.records import Record
from everlong.observe.console import BATCH, EVAL, format_duration
from everlong.observe.plots import plot_curves
from everlong.observe.sinks import Point, read_points

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.toml"
REPORT_FILE = "report.html"

REWARD = "reward"
SECONDS = "seconds/"
"""Names of timings begin with this."""


class TurnText(Record, frozen=True, kw_only=True):
    """A piece of an episode for people.

    Example: TurnText(role="assistant", text="ls -l")
    """

    role: str
    text: str


class EpisodeText(Record, frozen=True, kw_only=True):
    title: str
    """Which episode, of which task."""
    outcome: str
    """Reason and reward."""
    turns: tuple[TurnText, ...]


def write_report(
    run_folder: str | Path,
    *,
    balance: Mapping[str, Mapping[str, int]],
    episodes: Sequence[EpisodeText] = (),
) -> Path:
    """Write `report.html` into the run's folder, from its `metrics.jsonl` and `config.toml`; the path of the report.

    `balance`: the ledger's counts, by table and row. Parts that the run does not have yet are left out and said to be.
    """
    folder = Path(run_folder)
    points = read_points(folder / METRICS_FILE)
    html = _template().render(
        name=folder.resolve().name,
        curve=_curve(folder / METRICS_FILE, points),
        evals=_eval_table(points),
        balance=balance,
        timings=_timings(points),
        episodes=episodes,
        config=(folder / CONFIG_FILE).read_text() if (folder / CONFIG_FILE).exists() else "",
    )
    report = folder / REPORT_FILE
    report.write_text(html)
    return report


def _template() -> jinja2.Template:
    source = Path(__file__).with_name("report.html.jinja").read_text()
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)


def _curve(metrics: Path, points: Sequence[Point]) -> str:
    """The reward curves as a data URI; empty where no reward was measured."""
    if not any(point.values.get(REWARD) is not None for point in points):
        return ""
    with tempfile.NamedTemporaryFile(suffix=".png") as png:
        plot_curves(metrics, png.name, metrics=(REWARD,))
        return "data:image/png;base64," + base64.b64encode(Path(png.name).read_bytes()).decode()


def _eval_table(points: Sequence[Point]) -> list[list[str]]:
    """A header and one row per evaluation, the last written for each."""
    evals = {point.step: point.values for point in points if point.axis == EVAL}
    names = sorted({name for values in evals.values() for name in values})
    rows = [[str(step), *(_cell(evals[step].get(name)) for name in names)] for step in sorted(evals)]
    return [["eval", *names], *rows] if rows else []


def _timings(points: Sequence[Point]) -> dict[str, str]:
    """Where the time of the batches went."""
    totals: defaultdict[str, float] = defaultdict(float)
    for point in points:
        if point.axis == BATCH:
            for name, value in point.values.items():
                if name.startswith(SECONDS) and value is not None:
                    totals[name.removeprefix(SECONDS)] += value
    return {name: format_duration(seconds) for name, seconds in sorted(totals.items(), key=lambda item: -item[1])}


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
