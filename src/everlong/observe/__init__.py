"""What is measured and where it goes: sinks, curves, and the report of a run."""

from everlong.observe.console import ConsoleSink
from everlong.observe.intervals import Gain, interval_text, paired_gain, percent, success_text, wilson_interval
from everlong.observe.plots import Panel, Series, draw_panels, plot_panels, read_panels
from everlong.observe.report import (
    EpisodeText,
    Evaluation,
    LossRow,
    TurnText,
    read_evaluations,
    read_timings,
    write_report,
)
from everlong.observe.sinks import FanOut, JsonlSink, MemorySink, Point, read_points, read_rows
from everlong.observe.stages import SILENT, Stages

__all__ = [
    "SILENT",
    "ConsoleSink",
    "EpisodeText",
    "Evaluation",
    "FanOut",
    "Gain",
    "JsonlSink",
    "LossRow",
    "MemorySink",
    "Panel",
    "Point",
    "Series",
    "Stages",
    "TurnText",
    "draw_panels",
    "interval_text",
    "paired_gain",
    "percent",
    "plot_panels",
    "read_evaluations",
    "read_panels",
    "read_points",
    "read_rows",
    "read_timings",
    "success_text",
    "wilson_interval",
    "write_report",
]
