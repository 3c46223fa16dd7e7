"""What happens (events) and what shall be done (actions): the only language between decisions and the world.

Time stands inside the event. Every action is answered by exactly one event, except `CancelEpisode`, whose episode
answers by itself, and those that say so.
"""

from dataclasses import dataclass

from everlong.contracts.errors import EverlongError, Reason
from everlong.contracts.records import EpisodeOrder


@dataclass(frozen=True, slots=True)
class Started:
    """The run begins or goes on; the scheduler was built from what the ledger says."""

    now_s: float


@dataclass(frozen=True, slots=True)
class EpisodeEnded:
    now_s: float
    order: EpisodeOrder
    reason: Reason
    reward: float | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class BatchDone:
    """A batch's optimiser steps are done (and durable, where the action asked for it)."""

    now_s: float
    batch: int
    policy_version: int


@dataclass(frozen=True, slots=True)
class Published:
    now_s: float
    policy_version: int


@dataclass(frozen=True, slots=True)
class EngineUpdated:
    now_s: float
    policy_version: int


@dataclass(frozen=True, slots=True)
class EvalRecorded:
    now_s: float
    index: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened until the moment the scheduler asked to be woken at."""

    now_s: float


Event = Started | EpisodeEnded | BatchDone | Published | EngineUpdated | EvalRecorded | Tick


@dataclass(frozen=True, slots=True)
class RunEpisode:
    order: EpisodeOrder


@dataclass(frozen=True, slots=True)
class CancelEpisode:
    """Stop it now; it ends with `reason`."""

    episode: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class DropGroup:
    """This training group was replaced: what its episodes sampled is discarded. No event answers."""

    group: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Train supervised batch `batch` on oracle traces."""

    batch: int
    save: bool


@dataclass(frozen=True, slots=True)
class TrainGroups:
    """Close batch `batch` over these groups and train it; save makes it durable before it is announced."""

    batch: int
    groups: tuple[int, ...]
    save: bool
    deadlines: int = 0
    """How many deadlines it met before it closed."""
    postponed: int = 0
    """Groups that it left to the next batch, since nothing of them had begun at its deadline."""


@dataclass(frozen=True, slots=True)
class PauseSampling:
    """No new turn begins until `ResumeSampling`; agents wait, and their time limits with them. No event answers."""


@dataclass(frozen=True, slots=True)
class ResumeSampling:
    """Turns that were held back begin, under the weights that the engine holds now. No event answers."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Put the trainer's current version into the object store."""


@dataclass(frozen=True, slots=True)
class UpdateEngine:
    policy_version: int


@dataclass(frozen=True, slots=True)
class RecordEval:
    """All episodes of evaluation `index` have ended: say what they showed."""

    index: int
    policy_version: int
    groups: tuple[int, ...]


Action = (
    RunEpisode
    | CancelEpisode
    | DropGroup
    | WarmUp
    | TrainGroups
    | PauseSampling
    | ResumeSampling
    | Publish
    | UpdateEngine
    | RecordEval
)


class RunAborted(EverlongError):
    """The scheduler gave up: too many failures in a row. Carries the original traceback."""
