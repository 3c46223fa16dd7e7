"""From settings to a harness."""

from __future__ import annotations

from everlong.contracts.import_path import call_named, load_named
from everlong.rollouts.config import HarnessConfig
from everlong.rollouts.harnesses.bash import BashHarness
from everlong.rollouts.runner import Harness


def open_harness(config: HarnessConfig) -> Harness:
    """The harness that the config names: one of its own is called with the config. Raises ValueError where there is none."""
    if config.type == "bash":
        return BashHarness(config)
    make = load_named(config.type)
    harness = call_named(config.type, make, config) if callable(make) else None
    if harness is None or not callable(getattr(harness, "run", None)):
        raise ValueError(
            f"harness.type={config.type} must name what makes a harness when it is called with the harness settings: an "
            f"object with an async method run(task, session, sandbox); got {harness if callable(make) else make!r}"
        )
    return harness
