"""A run as one HTML file that needs nothing else: styles inline, pictures inside, no request to anywhere."""

from __future__ import annotations

import base64
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2

from everlong.contracts.records import Record
from everlong.observe.console import BATCH, EVAL, WARMUP, format_duration
from everlong.observe.intervals import Gain, interval_text, percent, success_text, wilson_interval
from everlong.observe.plots import Panel, draw_panels, read_panels
from everlong.observe.sinks import SECONDS, Point, read_points, read_rows

METRICS_FILE = "metrics.jsonl"
CONFIG_FILE = "config.toml"
REPORT_FILE = "report.html"

TRAINING_PARTS = ("forward", "backward", "optimizer")
"""What the trainer times within `seconds/training`."""


class TurnText(Record, frozen=True, kw_only=True):
    """A piece of an episode for people.

    Example: TurnText(role="assistant", text="ls -l")
    """

    role: str
    text: str
    fork: str = ""
    """Where the conversation goes on from, where that is not what stands above. Example: "goes on from turn 2"."""


class EpisodeText(Record, frozen=True, kw_only=True):
    title: str
    """Which episode, of which task."""
    outcome: str
    """Reason and reward."""
    turns: tuple[TurnText, ...]
    succeeded: bool | None = None
    """None where nobody judged."""


class LossRow(Record, frozen=True, kw_only=True):
    """What became of the episodes of about one length.

    Example: LossRow(length="190 to 200 tokens", episodes=20, lost=3)
    """

    length: str
    episodes: int
    lost: int

    @property
    def percent(self) -> str:
        return percent(self.lost / self.episodes, self.episodes)


class Evaluation(Record, frozen=True, kw_only=True):
    """Held-out tasks at one moment of the run, with the 95 % interval of the success."""

    num_batches: int
    """RL batches before it."""
    success: float
    episodes: int

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.success * self.episodes, self.episodes)

    @property
    def percent(self) -> str:
        return percent(self.success, self.episodes)

    @property
    def interval_text(self) -> str:
        return interval_text(*self.interval, self.episodes)

    @property
    def text(self) -> str:
        return success_text(self.success, self.episodes)


def read_evaluations(points: Sequence[Point]) -> list[Evaluation]:
    """In the order of the run. Those without episodes are left out."""
    found = []
    for step, values in sorted(read_rows(points, EVAL).items()):
        success, episodes = values.get("success"), values.get("episodes")
        if success is not None and episodes:
            found.append(Evaluation(num_batches=step, success=success, episodes=int(episodes)))
    return found


def write_report(
    run_folder: str | Path,
    *,
    summary: Mapping[str, str],
    balance: Mapping[str, Mapping[str, int]],
    losses: Sequence[LossRow] = (),
    episodes: Sequence[EpisodeText] = (),
    gain: Gain | None = None,
    warning: Sequence[str] = (),
) -> Path:
    """Write `report.html` into the run's folder, from its `metrics.jsonl` and `config.toml`; the path of the report.

    `summary`: what was trained and how, a sentence per part. `balance`: the ledger's counts, by table and row.
    `warning`: what a reader must know first, line by line.
    `losses`: from the shortest episodes to the longest. `gain`: from the first evaluation to the last, on the same tasks.
    Parts that the run does not have yet are left out and said to be.
    """
    folder = Path(run_folder)
    points = read_points(folder / METRICS_FILE)
    html = _template().render(
        name=folder.resolve().name,
        warning=warning,
        summary=summary,
        panels=[(panel.title, _picture(panel)) for panel in read_panels(points)],
        evaluations=read_evaluations(points),
        balance=balance,
        losses=losses,
        gain=gain,
        timings=read_timings(points),
        episodes=episodes,
        config=(folder / CONFIG_FILE).read_text() if (folder / CONFIG_FILE).exists() else "",
    )
    report = folder / REPORT_FILE
    partial = folder / f"{REPORT_FILE}.partial"
    partial.write_text(html)
    os.replace(partial, report)
    return report


def read_timings(points: Sequence[Point]) -> list[list[str]]:
    """Where the time went: a header, a row per part and the sum, by phase of the run. Empty where nothing was timed.

    What the trainer times within its batches is indented below and not added again.
    """
    totals: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for point in points:
        for name, value in point.values.items():
            if name.startswith(SECONDS) and value is not None and (phase := _phase(point)):
                totals[name.removeprefix(SECONDS)][phase] += value
    if not totals:
        return []
    phases = [phase for phase in ("warm-up", "RL", "evaluation") if any(phase in row for row in totals.values())]
    inner = [part for part in TRAINING_PARTS if part in totals and "training" in totals]
    outer = sorted((part for part in totals if part not in inner), key=lambda part: -sum(totals[part].values()))
    rows = []
    for part in outer:
        rows.append(_timing_row(part, totals[part], phases))
        if part == "training":
            rows += [_timing_row(f"– of it {name}", totals[name], phases) for name in inner]
    added = {phase: sum(totals[part][phase] for part in outer) for phase in phases}
    return [["", *phases, "together"], *rows, _timing_row("together", added, phases)]


def _timing_row(name: str, seconds: Mapping[str, float], phases: Sequence[str]) -> list[str]:
    cells = [_duration(seconds.get(phase)) for phase in phases]
    return [name, *cells, _duration(sum(seconds.values()))]


def _duration(seconds: float | None) -> str:
    if not seconds:
        return "–"
    return format_duration(seconds) if seconds >= 10 else f"{seconds:.1f} s"


def _phase(point: Point) -> str:
    if point.axis == BATCH:
        return "warm-up" if point.values.get(WARMUP) else "RL"
    return "evaluation" if point.axis == EVAL else ""


def _template() -> jinja2.Template:
    source = Path(__file__).with_name("report.html.jinja").read_text()
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(source)


def _picture(panel: Panel) -> str:
    """As a data URI."""
    return "data:image/png;base64," + base64.b64encode(draw_panels([panel])).decode()
