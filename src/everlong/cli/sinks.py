"""Where a run's measured points go."""

from __future__ import annotations

from rich.console import Console

from everlong.cli.config import RunConfig
from everlong.cli.run_folder import RunFolder
from everlong.contracts.ports import MetricSink
from everlong.observe import ConsoleSink, FanOut, JsonlSink


def open_sinks(config: RunConfig, folder: RunFolder) -> MetricSink:
    sinks: list[MetricSink] = [JsonlSink(folder.metrics)]
    if config.observe.progress != "none":
        num_batches = config.warmup.num_batches + config.schedule.num_batches
        plain = config.observe.progress == "plain"
        terminal = Console(stderr=True, force_terminal=False if plain else None)
        sinks.append(ConsoleSink(num_batches, config.warmup.num_batches, terminal))
    return FanOut(*sinks)
