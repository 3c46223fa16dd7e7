"""Whether a process still answers. One that is stopped or hangs keeps its socket open, and nothing else would say so."""

from __future__ import annotations

import logging

BEAT_S = 10.0
"""Between two questions to a worker. Its calls compute in threads, so that it answers in the middle of the longest turn."""
SILENT_S = 60.0
"""Of silence until it is said: longer than a machine that swaps needs for an answer, shorter than anybody's patience."""

_LOG = logging.getLogger(__name__)


class Heartbeat:
    """Counts beats and no clock: a machine that slept was not silent meanwhile. Says it once, and once that it is over."""

    def __init__(self, who: str, advice: str) -> None:
        """`who`: example "the engine process (pid 4711)". `advice`: what to do where it is silent."""
        self._who, self._advice = who, advice
        self._silent_s = 0.0
        self._told = False

    def beat(self, heard: bool, after_s: float) -> None:
        """`heard`: whether anything came since the beat before, `after_s` seconds ago."""
        self._silent_s = 0.0 if heard else self._silent_s + after_s
        if heard and self._told:
            _LOG.warning("%s answers again", self._who)
        elif self._silent_s >= SILENT_S and not self._told:
            _LOG.warning("nothing was heard from %s for %.0f s: %s", self._who, self._silent_s, self._advice)
        self._told = self._silent_s >= SILENT_S
