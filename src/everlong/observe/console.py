"""A run in the terminal: one line per batch and evaluation, and a live line below where there is a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

BATCH, EVAL = "batch", "eval"
REASONS = "reason/"
"""Names of the counts of episodes by how they ended begin with this."""


class ConsoleSink:
    """Shows of the axis "batch": `reward`, `sampled_tokens` per second since the batch before, and `reason/<why>`, the
    episodes by how they ended; of "eval": everything. Ignores other axes.

    `num_batches`: of the whole run, for the time left. A point is shown when it comes; nothing is kept.
    """

    def __init__(
        self, num_batches: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._num_batches, self._clock = num_batches, clock
        self._console = console or Console(stderr=True)
        self._first: tuple[int, float] | None = None
        self._started_s = self._previous_s = clock()
        self._live: Live | None = None

    def log(self, axis: str, step: int, values: dict[str, float]) -> None:
        if axis == BATCH:
            self._console.print(self._batch_line(step, values), highlight=False, soft_wrap=True)
            self._show(step, values)
        elif axis == EVAL:
            shown = "  ".join(f"{name} {_number(value)}" for name, value in values.items())
            self._console.print(Text(f"eval {step}  {shown}", style="bold"), highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _batch_line(self, step: int, values: dict[str, float]) -> Text:
        parts = [f"batch {step + 1}/{self._num_batches}"]
        if "reward" in values:
            parts.append(f"reward {values['reward']:.3f}")
        elapsed_s, self._previous_s = self._clock() - self._previous_s, self._clock()
        if "sampled_tokens" in values and elapsed_s > 0:
            parts.append(f"{values['sampled_tokens'] / elapsed_s:,.0f} tokens/s")
        parts += [f"{name.removeprefix(REASONS)} {n:.0f}" for name, n in values.items() if name.startswith(REASONS)]
        left_s = self._left_s(step)
        if left_s is not None:
            parts.append(f"{format_duration(left_s)} left")
        return Text("  ".join(parts))

    def _left_s(self, step: int) -> float | None:
        """From the pace since the first batch of this process; None until there is a pace."""
        now_s = self._clock()
        if self._first is None:
            self._first = step, now_s
            return None
        first, first_s = self._first
        return (now_s - first_s) / (step - first) * (self._num_batches - 1 - step) if step > first else None

    def _show(self, step: int, values: dict[str, float]) -> None:
        if not self._console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(self._status(step, values), refresh=True)

    def _status(self, step: int, values: dict[str, float]) -> Table:
        table = Table.grid(padding=(0, 2))
        done = (step + 1) / self._num_batches if self._num_batches else 1.0
        filled = round(24 * min(1.0, done))
        running_s = self._clock() - self._started_s
        table.add_row(
            Text("█" * filled + "░" * (24 - filled), style="cyan"), f"{done:.0%}", f"{format_duration(running_s)} gone"
        )
        return table


def format_duration(seconds: float) -> str:
    """Example: 3780 is "1 h 03 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _number(value: float) -> str:
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.3f}"
