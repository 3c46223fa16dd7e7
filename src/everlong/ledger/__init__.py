"""What happened: append-only facts, the lifecycle state machine that checks them, and any view by replay.

Invariants: a fact is checked before it is written and durable before its writer goes on; every episode ends in exactly one
state; every sampled token ends as trained or discarded for a named reason. One process writes; others may read meanwhile.
The only importer of apsw.
"""

from everlong.ledger.check import LedgerReport, check_ledger, read_lifecycle
from everlong.ledger.episodes import EpisodeStore, StoredEpisode
from everlong.ledger.facts import (
    BatchClosed,
    BatchTrained,
    CallUncounted,
    EngineChanged,
    EngineUpdated,
    EpisodeEnded,
    EpisodeFinished,
    EpisodeInterrupted,
    EpisodeStarted,
    EpisodeState,
    EvalFinished,
    Fact,
    GroupOpened,
    RunFinished,
    RunResumed,
    RunStarted,
    TokensDiscarded,
    TurnSampled,
    VersionPublished,
    WeightsAdopted,
)
from everlong.ledger.ledger import LEDGER_FILE, Entry, Ledger
from everlong.ledger.lifecycle import BatchView, EpisodeView, GroupView, Lifecycle
from everlong.ledger.views import Balance, Decile
from everlong.ledger.writer import LedgerWriter

__all__ = [
    "LEDGER_FILE",
    "Balance",
    "BatchClosed",
    "BatchTrained",
    "BatchView",
    "CallUncounted",
    "Decile",
    "EngineChanged",
    "EngineUpdated",
    "Entry",
    "EpisodeEnded",
    "EpisodeFinished",
    "EpisodeInterrupted",
    "EpisodeStarted",
    "EpisodeState",
    "EpisodeStore",
    "EpisodeView",
    "EvalFinished",
    "Fact",
    "GroupOpened",
    "GroupView",
    "Ledger",
    "LedgerReport",
    "LedgerWriter",
    "Lifecycle",
    "RunFinished",
    "RunResumed",
    "RunStarted",
    "StoredEpisode",
    "TokensDiscarded",
    "TurnSampled",
    "VersionPublished",
    "WeightsAdopted",
    "check_ledger",
    "read_lifecycle",
]
