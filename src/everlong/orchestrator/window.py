"""The time between two batches: what was trained in it, and who had nothing to do."""

from __future__ import annotations

from collections.abc import Callable

BUSY_S = "busy_s"
"""The engine's own metric of the seconds it has computed since it was opened; without it nobody knows its idle share."""


class BatchWindow:
    """Opens with the first version that the engine holds, and again with every row. Evaluations are in it."""

    def __init__(self, clock: Callable[[], float], *, apart: bool) -> None:
        """`apart`: engine and trainer have compute of their own, half of the whole each; else they take turns on all of it."""
        self._clock, self._apart = clock, apart
        self._since_s: float | None = None
        self._engine_s: float | None = None
        """What the engine had computed when the window opened."""
        self._training_s = 0.0

    def open(self, engine_s: float | None) -> None:
        """Only the first time; `engine_s` is what the engine says of itself, None where it does not."""
        if self._since_s is None:
            self._since_s, self._engine_s, self._training_s = self._clock(), engine_s, 0.0

    def add_training(self, seconds: float) -> None:
        """The trainer worked: it trained, saved or published."""
        self._training_s += seconds

    def close(self, engine_s: float | None, num_samples: int) -> dict[str, float]:
        """The row of the batch with which it ends, over `num_samples` episodes that trained; the next window opens."""
        self.open(engine_s)
        assert self._since_s is not None
        seconds = self._clock() - self._since_s
        values = {"seconds/between_batches": seconds}
        if seconds > 0:
            values |= {"samples_per_hour": 3600 * num_samples / seconds, **self._idle(engine_s, seconds)}
        self._since_s, self._engine_s, self._training_s = self._clock(), engine_s, 0.0
        return values

    def _idle(self, engine_s: float | None, seconds: float) -> dict[str, float]:
        """Shares of the time in which the trainer, the engine, and the compute that they have, computed nothing."""
        trainer = min(1.0, self._training_s / seconds)
        idle = {"idle/trainer": 1 - trainer}
        if engine_s is not None and self._engine_s is not None:
            engine = min(1.0, (engine_s - self._engine_s) / seconds)
            busy = (engine + trainer) / 2 if self._apart else min(1.0, engine + trainer)
            idle |= {"idle/engine": 1 - engine, "idle": 1 - busy}
        return idle
