"""What is measured and where it goes: metrics that know how to reduce, sinks, curves, and the report of a run."""

from everlong.observe.console import ConsoleSink
from everlong.observe.metrics import Measure, Metrics, Reduce
from everlong.observe.plots import plot_curves
from everlong.observe.report import EpisodeText, TurnText, write_report
from everlong.observe.sinks import FanOut, JsonlSink, MemorySink, Point, read_points

__all__ = [
    "ConsoleSink",
    "EpisodeText",
    "FanOut",
    "JsonlSink",
    "Measure",
    "MemorySink",
    "Metrics",
    "Point",
    "Reduce",
    "TurnText",
    "plot_curves",
    "read_points",
    "write_report",
]
