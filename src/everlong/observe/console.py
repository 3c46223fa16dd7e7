"""A run in the terminal: a line per batch and evaluation, and a live line below where there is a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from everlong.observe.intervals import success_text

BATCH, EVAL = "batch", "eval"
WARMUP = "phase/warmup"
"""A batch that holds this imitates oracle traces."""
REASONS = "reason/"
"""Names of the counts of episodes by how they ended begin with this."""
WARMUP_EVERY = 10
"""Of the warm-up batches so many share a line: there are hundreds, and each takes a second."""


class ConsoleSink:
    """Shows of the axis "batch": `loss` in the warm-up, then `reward`, `tokens_per_s`, `idle` and `reason/<why>`, the
    episodes by how they ended, and where no group has signal that; of "eval": `success` with its interval over `episodes`.
    Ignores other axes.

    `num_batches`: of the whole run, `num_warmup` of them before the RL batches; for the time left. A point is shown when
    it comes; nothing is kept.
    """

    def __init__(
        self,
        num_batches: int,
        num_warmup: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_warmup, self._num_rl = num_warmup, num_batches - num_warmup
        self._clock = clock
        self._console = console or Console(stderr=True)
        self._paces = {True: _Pace(), False: _Pace()}
        """Of the warm-up, and of what follows."""
        self._started_s = clock()
        self._live: Live | None = None

    def log(self, axis: str, step: int, values: Mapping[str, float]) -> None:
        if axis == BATCH and values.get(WARMUP):
            self._warmup(step + 1, values)
        elif axis == BATCH:
            self._batch(step + 1 - self._num_warmup, values)
        elif axis == EVAL:
            self._print(Text(f"  {_eval_name(step)}  {_eval_text(values)}", style="bold green"))

    def close(self) -> None:
        """Idempotent."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _warmup(self, done: int, values: Mapping[str, float]) -> None:
        left_s = self._paces[True].left_s(done, self._num_warmup, self._clock())
        name = f"warm-up {_of(done, self._num_warmup)}"
        if done == 1 or done % WARMUP_EVERY == 0 or done == self._num_warmup:
            parts = [name]
            if "loss" in values:
                parts.append(f"loss {values['loss']:.3f}")
            self._print(_line(parts, left_s, "of warm-up left"))
        self._show(name, done, self._num_warmup, left_s)

    def _batch(self, done: int, values: Mapping[str, float]) -> None:
        left_s = self._paces[False].left_s(done, self._num_rl, self._clock())
        name = f"batch {_of(done, self._num_rl)}"
        parts = [name, *_signal(values)]
        if "reward" in values:
            parts.append(f"reward {values['reward']:.3f}")
        if "tokens_per_s" in values:
            parts.append(f"{values['tokens_per_s']:5,.0f} tokens/s")
        if "idle" in values:
            parts.append(f"idle {values['idle']:3.0%}")
        if postponed := values.get("groups_postponed"):
            parts.append(f"left to the next batch, since no slot was free: {postponed:.0f} groups")
        parts += [
            f"{name.removeprefix(REASONS)} {n:.0f}" for name, n in sorted(values.items()) if name.startswith(REASONS)
        ]
        self._print(_line(parts, left_s, "left"))
        self._show(name, done, self._num_rl, left_s)

    def _print(self, text: Text) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)

    def _show(self, name: str, done: int, total: int, left_s: float | None) -> None:
        """The live line: where there is no terminal, nothing."""
        if not self._console.is_terminal:
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(self._status(name, done, total, left_s), refresh=True)

    def _status(self, name: str, done: int, total: int, left_s: float | None) -> Table:
        table = Table.grid(padding=(0, 2))
        share = min(1.0, done / total) if total else 1.0
        filled = round(24 * share)
        parts = [Text("█" * filled + "░" * (24 - filled), style="cyan"), f"{share:.0%}", name]
        parts.append(f"{format_duration(self._clock() - self._started_s)} gone")
        if left_s is not None:
            parts.append(f"{format_duration(left_s)} left")
        table.add_row(*parts)
        return table


def _signal(values: Mapping[str, float]) -> list[str]:
    """That a batch left the weights as they were, where it did, and why."""
    groups, silent = values.get("groups", 0.0), values.get("groups_without_signal", 0.0)
    if not groups or silent < groups or values.get("tokens/trained", 0.0):
        return []
    if unjudged := values.get("groups_without_verdicts", 0.0):
        return [f"no signal: of {groups:.0f} groups {silent - unjudged:.0f} agree, {unjudged:.0f} lack verdicts"]
    return ["no signal: its one group agrees" if groups == 1 else f"no signal: all {groups:.0f} groups agree"]


class _Pace:
    """Time left, from the pace since the first batch that this process saw."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def left_s(self, done: int, total: int, now_s: float) -> float | None:
        """None until there is a pace."""
        if self._first is None:
            self._first = done, now_s
            return None
        first, first_s = self._first
        return (now_s - first_s) / (done - first) * (total - done) if done > first else None


def format_duration(seconds: float) -> str:
    """Example: 3780 is "1 h 03 min"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _of(done: int, total: int) -> str:
    """Aligned, so that the lines below each other are columns."""
    return f"{done:{len(str(total))}d}/{total}"


def _line(parts: list[str], left_s: float | None, left: str) -> Text:
    text = Text("  ".join(parts))
    if left_s:
        text.append(f"  {format_duration(left_s)} {left}", style="dim")
    return text


def _eval_name(index: int) -> str:
    return f"held-out tasks after {index} RL batches" if index else "held-out tasks before RL"


def _eval_text(values: Mapping[str, float]) -> str:
    """Success with its interval where the point says of how many, else whatever it holds. No verdict is no success of 0."""
    if values.get("episodes") == 0 and "without_verdict" in values:
        return f"no verdict in {values['without_verdict']:.0f} episodes{_never_began(values)}"
    if "success" not in values or "episodes" not in values:
        return "  ".join(f"{name} {value:.4g}" for name, value in values.items())
    missing = values.get("without_verdict", 0.0)
    without = f", {missing:.0f} without verdict{_never_began(values)}" if missing else ""
    return (
        f"success {success_text(values['success'], values['episodes'])} of {values['episodes']:.0f} episodes{without}"
    )


def _never_began(values: Mapping[str, float]) -> str:
    count = values.get(f"{REASONS}never_began", 0.0)
    return f" ({count:.0f} of them never began)" if count else ""
