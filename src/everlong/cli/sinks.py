"""Where a run's measured points go."""

from __future__ import annotations

from rich.console import Console

from everlong.cli.config import RunConfig
from everlong.cli.run_folder import RunFolder
from everlong.contracts.ports import MetricSink
from everlong.observe import ConsoleSink, FanOut, JsonlSink


def progress_console(config: RunConfig) -> Console | None:
    """The terminal as `observe.progress` wants it; None says nothing. One for a whole run: a live line minds what is printed."""
    if config.observe.progress == "none":
        return None
    return Console(stderr=True, force_terminal=False if config.observe.progress == "plain" else None)


def open_sinks(config: RunConfig, folder: RunFolder, terminal: Console | None = None) -> MetricSink:
    sinks: list[MetricSink] = [JsonlSink(folder.metrics)]
    if terminal is not None:
        num_batches = config.warmup.num_batches + config.schedule.num_batches
        sinks.append(ConsoleSink(num_batches, config.warmup.num_batches, terminal))
    return FanOut(*sinks)
