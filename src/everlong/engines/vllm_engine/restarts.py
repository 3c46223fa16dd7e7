"""When a lost server is brought back, and when the run is told instead. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Restarts:
    """Counts losses in a row: an answer between two of them shows that the server as such works."""

    limit: int
    in_a_row: int = 0
    total: int = 0

    def lost(self) -> bool:
        """Whether to bring the server back once more."""
        self.in_a_row += 1
        self.total += 1
        return self.in_a_row <= self.limit

    def answered(self) -> None:
        self.in_a_row = 0
