"""What goes on while there is no batch to show: a line before each stage, and how long it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console

from everlong.observe.console import format_duration

SHORT_S = 1.0
"""A stage that was over sooner gets no second line."""


class Stages:
    """`console`: None says nothing."""

    def __init__(self, console: Console | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock

    def say(self, line: str) -> None:
        if self._console is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def stage(self, doing: str) -> Generator[None]:
        """Say what is done before it is; one that breaks gets no second line, since its error is said elsewhere."""
        self.say(doing)
        began_s = self._clock()
        yield
        if (took_s := self._clock() - began_s) >= SHORT_S:
            self.say(f"  took {format_duration(took_s)}")


SILENT = Stages(None)
