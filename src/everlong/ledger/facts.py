"""The facts of a run, one record each, in the order in which they usually come."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from everlong.contracts.errors import LedgerError, Reason
from everlong.contracts.records import MemberState, Purpose, Record


class EpisodeState(StrEnum):
    """Where an episode stands. The last five are ends: an episode reaches exactly one of them, once."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """A crash of ours stopped it: the same attempt starts again, or is cancelled."""
    FINISHED = "finished"
    """It is stored and waits for what becomes of it."""
    TRAINED = "trained"
    EVALUATED = "evaluated"
    DISCARDED = "discarded"
    """On purpose: stale, filtered, of a group without signal."""
    FAILED = "failed"
    """Through no doing of the agent."""
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self not in (EpisodeState.RUNNING, EpisodeState.INTERRUPTED, EpisodeState.FINISHED)


class _Fact(Record, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Written once, never changed. The tag is the class's name."""


class RunStarted(_Fact, frozen=True, kw_only=True):
    seed: int
    config_hash: str
    tasks_hash: str


class RunResumed(_Fact, frozen=True, kw_only=True):
    """Another process goes on with the run."""

    num_batches: int | None = None
    """Batches that the restored checkpoint holds: those after it are trained again. None where nothing was lost."""


class GroupOpened(_Fact, frozen=True, kw_only=True):
    purpose: Purpose
    group: int
    task: str
    content_hash: str
    """Of the task."""


class EpisodeStarted(_Fact, frozen=True, kw_only=True):
    episode: str
    group: int
    attempt: int
    purpose: Purpose
    task: str
    incarnation: int
    """0, then one more after each interruption."""


class TurnSampled(_Fact, frozen=True, kw_only=True):
    episode: str
    incarnation: int
    turn: int
    num_tokens: int


class TokensDiscarded(_Fact, frozen=True, kw_only=True):
    """Tokens that an engine sampled and that are in no turn."""

    episode: str
    incarnation: int
    num_tokens: int
    reason: str


class CallUncounted(_Fact, frozen=True, kw_only=True):
    """A model call ended without saying what it had sampled: some number of tokens up to the limit is in no account."""

    episode: str
    incarnation: int
    max_tokens: int
    reason: str


class EpisodeInterrupted(_Fact, frozen=True, kw_only=True):
    """This incarnation is lost: what its turns sampled ends as discarded, reason "interrupted"."""

    episode: str
    incarnation: int


class EpisodeFinished(_Fact, frozen=True, kw_only=True):
    """The episode is stored under `payload_key`; what becomes of it is not yet known."""

    episode: str
    incarnation: int
    reason: Reason
    reward: float | None
    """None where there is no verdict that may teach."""
    num_sampled: int
    payload_key: str
    payload_hash: str
    flags: tuple[str, ...] = ()
    """Signs of cheating or tampering that grading saw, by name."""


class BatchClosed(_Fact, frozen=True, kw_only=True):
    """The batch trains on these groups and no others. A supervised batch has none."""

    batch: int
    groups: tuple[int, ...]


class BatchTrained(_Fact, frozen=True, kw_only=True):
    batch: int
    policy_version: int


class EpisodeEnded(_Fact, frozen=True, kw_only=True):
    """The end: no fact about the episode follows."""

    episode: str
    state: EpisodeState
    reason: str
    trained: int
    """Sampled tokens that were trained."""
    discarded: dict[str, int]
    """Sampled tokens that were not, by reason; those of earlier `TokensDiscarded` facts of this incarnation included."""


class VersionPublished(_Fact, frozen=True, kw_only=True):
    version: int
    base_version: int | None
    size_bytes: int


class WeightsAdopted(_Fact, frozen=True, kw_only=True):
    """Trained again after a crash, the batches up to a version gave other bits than were published: the trainer took up the published
    ones, with the moments of what it trained again."""

    version: int
    trained: str
    """Fingerprint of what came out."""
    published: str


class EngineUpdated(_Fact, frozen=True, kw_only=True):
    version: int


class EngineChanged(_Fact, frozen=True, kw_only=True):
    """An engine of a pool stands otherwise than before."""

    engine: str
    state: MemberState
    mismatch: float | None
    """Nats per token between its logprobs and the trainer's; None where nothing was measured."""
    num_measured: int
    reason: str


class EvalFinished(_Fact, frozen=True, kw_only=True):
    index: int
    policy_version: int
    successes: int
    episodes: int
    """With a verdict."""


class RunFinished(_Fact, frozen=True, kw_only=True):
    """Everything that was started has ended."""


Fact = (
    RunStarted
    | RunResumed
    | GroupOpened
    | EpisodeStarted
    | TurnSampled
    | TokensDiscarded
    | CallUncounted
    | EpisodeInterrupted
    | EpisodeFinished
    | BatchClosed
    | BatchTrained
    | EpisodeEnded
    | VersionPublished
    | WeightsAdopted
    | EngineUpdated
    | EngineChanged
    | EvalFinished
    | RunFinished
)

_DECODER = msgspec.json.Decoder(Fact)


def encode_fact(fact: Fact) -> str:
    """Raises LedgerError for a fact that could not be read back: a value of another type than its field's."""
    try:
        raw = msgspec.json.encode(fact)
        _DECODER.decode(raw)
    except (TypeError, ValueError) as error:
        raise LedgerError(f"expected a fact whose fields have their types, got {fact!r}: {error}") from error
    return raw.decode()


def decode_fact(text: str) -> Fact:
    """Raises LedgerError where the text is not a fact."""
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise LedgerError(
            f"not a fact ({error}): {text[:200]!r}; the ledger is damaged or of another everlong"
        ) from error
