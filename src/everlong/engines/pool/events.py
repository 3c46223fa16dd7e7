"""What happens to a pool, and what it decides. Requests are numbered by tickets, engines by their place."""

from __future__ import annotations

from dataclasses import dataclass

from everlong.contracts.records import EngineMismatch


@dataclass(frozen=True, slots=True)
class Asked:
    ticket: int
    """Given once, never again."""
    episode: str
    min_policy_version: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Answered:
    ticket: int
    num_tokens: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Broke:
    """The engine that had the request failed; nobody has seen an answer."""

    ticket: int
    reason: str
    at_s: float
    lost: bool = False
    """The engine died or hangs with all that it had; an update brings it back."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Nobody waits for the request any more, wherever it is."""

    ticket: int


@dataclass(frozen=True, slots=True)
class VersionWanted:
    policy_version: int


@dataclass(frozen=True, slots=True)
class Updated:
    engine: int
    policy_version: int
    at_s: float


@dataclass(frozen=True, slots=True)
class UpdateFailed:
    engine: int
    reason: str
    unreachable: bool
    """No chain of deltas leads there: the engine is as it was. Else it is the engine that failed."""
    at_s: float
    lost: bool = False
    """The engine died or hangs; the next update brings it back."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What training on a batch said of those who had sampled it."""

    mismatch: tuple[EngineMismatch, ...]
    at_s: float


Event = Asked | Answered | Broke | Withdrawn | VersionWanted | Updated | UpdateFailed | Measured


@dataclass(frozen=True, slots=True)
class Send:
    ticket: int
    engine: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """No engine can take the request, and none that is being updated will."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Update:
    engine: int
    policy_version: int


Action = Send | Refuse | Update
