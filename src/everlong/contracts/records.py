"""The records that cross rooms, in the order in which data meets them: task, order, request, reply, turn, episode, batch.

Every record is frozen; a per-token stream lives in `TokenColumns` only. `encode_record` and `decode_record` put them on
a wire or a disk without loss.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, TypeVar

import msgspec
import numpy as np

from everlong.contracts.decisions import Decisions
from everlong.contracts.errors import Reason
from everlong.contracts.tokens import TokenColumns


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Something that crosses a room."""


# Tasks ---------------------------------------------------------------------------------------------------------------


class Limits(Record, frozen=True, kw_only=True):
    """What a sandbox may use."""

    memory_mb: int = 2048
    disk_mb: int = 10240
    processes: int = 256
    output_bytes: int = 1 << 20
    """Per command; what exceeds it is cut and said."""


class Task(Record, frozen=True, kw_only=True):
    """What is asked of the agent, as read from a task folder.

    Example: Task(id="terminal/count-lines/17", folder="tasks/count-lines-17", content_hash="9f..", instruction="Count ..")
    """

    id: str
    folder: str
    content_hash: str
    """Of every file of the folder; the same task in two places has the same hash."""
    instruction: str
    workdir: str = "/app"
    env: dict[str, str] = {}
    kind: str = ""
    """What the task has in common with its variants; empty where the source does not say."""
    agent_timeout_s: float = 600.0
    verifier_timeout_s: float = 600.0
    network: bool = False
    limits: Limits = Limits()


class Purpose(StrEnum):
    TRAIN = "train"
    EVAL = "eval"


class EpisodeOrder(Record, frozen=True, kw_only=True):
    """One attempt that somebody must run. It ends as exactly one episode.

    Example: EpisodeOrder(task="terminal/count-lines/17", group=4, attempt=2, purpose=Purpose.TRAIN, min_policy_version=9)
    """

    task: str
    group: int
    """Numbers the groups of one purpose over the whole run; never derived from a task's name."""
    attempt: int
    """0-based within the group."""
    purpose: Purpose
    min_policy_version: int = 0
    incarnation: int = 0
    """Grows each time a crash makes the same attempt start again; it does not enter the sampling key."""

    @property
    def episode(self) -> str:
        """The episode's id, the same in every incarnation."""
        return f"{self.purpose}-{self.group:06d}-{self.attempt:03d}"


# Engine --------------------------------------------------------------------------------------------------------------


class SamplingParams(Record, frozen=True, kw_only=True):
    """How a turn is sampled. They come from the run, never from the agent."""

    temperature: float = 1.0
    """Above 0. Greedy decoding is `top_k=1`."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    max_tokens: int = 256
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    kept_logprobs: bool = False
    """Whether the sampler's logprob of every kept id is recorded beside the sampled one's."""
    record: tuple[str, ...] = ()
    """Names of the network's decisions that are recorded, of every token of prompt and answer."""


class SamplingKey(Record, frozen=True, kw_only=True):
    """Names the random numbers of one turn. A token's number depends on this and its position in the turn, on no neighbour."""

    run_seed: int
    episode: str
    turn: int


class GenerateRequest(Record, frozen=True, kw_only=True, eq=False):
    """Token ids in, never text."""

    request_id: str
    key: SamplingKey
    prompt_ids: np.ndarray
    """int32[P]"""
    params: SamplingParams
    min_policy_version: int = 0
    """An engine that holds an older version refuses."""
    num_known: int = 0
    """How many of the prompt's first tokens the caller has in earlier turns, with their decisions: the reply leaves these out."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class GenerateReply(Record, frozen=True, kw_only=True, eq=False):
    """Token ids out: what was sampled, with its logprob, version and kept set. Nothing is appended that was not sampled."""

    request_id: str
    columns: TokenColumns
    context: Decisions | None = None
    """Of the prompt's tokens behind `num_known`, as many rows as these are; None where nothing was recorded."""
    finish_reason: FinishReason
    stop_match: int | str | None = None
    """The stop id or string that ended the turn."""
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache."""
    num_reported: int | None = None
    """Tokens that the engine says it sampled, counted apart from the ids; None where it does not say."""


class EngineStatus(Record, frozen=True, kw_only=True):
    policy_version: int
    fingerprint: str
    """Of the weights the engine will use for the next token."""
    num_running: int = 0
    num_waiting: int = 0
    metrics: dict[str, float] = {}
    trouble: str = ""
    """What of it is lost at the moment, and what is done or to be done about that."""


class MemberState(StrEnum):
    """Of an engine of a pool."""

    JOINING = "joining"
    """It has held no version yet."""
    SERVING = "serving"
    LOST = "lost"
    """It died or hangs and is being brought back: it gets no requests until it is."""
    FAILED = "failed"
    """It gets no requests until it holds a version again."""
    QUARANTINED = "quarantined"
    """What it says is too far from the trainer: it gets no requests any more."""

    @property
    def hopeful(self) -> bool:
        """Whether it answers requests, or will without anybody's doing."""
        return self in (MemberState.JOINING, MemberState.SERVING, MemberState.LOST)


class MemberStatus(Record, frozen=True, kw_only=True):
    """How one engine of a pool stands.

    Example: MemberStatus(engine="1-vllm", state=MemberState.SERVING, policy_version=8, mismatch=0.04, num_measured=1213)
    """

    engine: str
    state: MemberState
    policy_version: int
    mismatch: float | None = None
    """Mean |log(p/q)| in nats of its newest measured tokens, beyond what the age of their version explains; None without any."""
    num_measured: int = 0
    """Tokens in that mean."""
    reason: str = ""
    """Why it failed or is quarantined, and what to do."""


# Trajectories --------------------------------------------------------------------------------------------------------


class Turn(Record, frozen=True, kw_only=True, eq=False):
    """One model call, stored once: what it adds to the turn that it continues.

    The engine saw exactly: the columns of the path up to `parent`, then `context`; it answered `sampled`.
    """

    index: int
    parent: int
    """Index of the turn it continues; -1 for a child of the root."""
    context: TokenColumns
    sampled: TokenColumns
    finish_reason: FinishReason
    request_id: str = ""
    role: str = "main"
    continues: int = -1
    """Across a compaction or a fork on mismatch: the turn whose work this one goes on with; -1 for none."""
    malformed: bool = False
    """It held a tool call that could not be read, and was not merely cut off at its limit."""


MAX_REWARD = 2.0**125
"""Of a verdict, either sign: the difference of two such rewards, doubled (credit's largest factor), is a finite float32."""


class Verdict(Record, frozen=True, kw_only=True):
    """What grading said. `reward` None means that there is no verdict, which is not a reward of 0."""

    reward: float | None
    reason: Reason | None = None
    """Why there is no verdict, where there is none."""
    flags: tuple[str, ...] = ()
    """Signs of cheating or tampering, by name."""
    output: str = ""


class Episode(Record, frozen=True, kw_only=True, eq=False):
    """One attempt, ended. A failed episode is still an episode, with its reason."""

    order: EpisodeOrder
    reason: Reason
    verdict: Verdict
    turns: tuple[Turn, ...] = ()
    num_discarded: int = 0
    """Sampled tokens that are in no turn: the client was gone, or the turn was aborted."""
    elapsed_s: float = 0.0
    metrics: dict[str, float] = {}
    error: str = ""
    """Traceback of the failure, where it was ours."""

    @property
    def id(self) -> str:
        return self.order.episode

    @property
    def num_sampled(self) -> int:
        """Every token that an engine sampled for this episode, in a turn or not."""
        return sum(turn.sampled.num_sampled for turn in self.turns) + self.num_discarded

    @property
    def reward(self) -> float | None:
        """The reward that may teach: None where a failure of ours, not the agent, ended the episode."""
        return self.verdict.reward if self.reason.trustworthy else None


class ScoredGroup(Record, frozen=True, kw_only=True, eq=False):
    """A group's episodes with one credit each. Credit None (no verdict) is not credit 0."""

    group: int
    task: str
    episodes: tuple[Episode, ...]
    credits: tuple[float | None, ...]
    """Aligned with `episodes`."""
    rewards: tuple[float | None, ...] = ()
    """What the credit is made of: the verdicts, less what a length near the limit costs. Aligned with `episodes`."""
    malformed_call: float = 0.0
    """What each token of a turn with a malformed tool call loses of its credit; in no baseline."""
    baseline: float | None = None
    discarded: str | None = None
    """Why the whole group has nothing to teach: "zero_signal" (all rewards equal; admission may keep it), "too_few_verdicts";
    None where it trains."""


# Trainer -------------------------------------------------------------------------------------------------------------


class Segment(Record, frozen=True, kw_only=True):
    """A run of tokens in a packed tree; it follows the last token of its parent segment in position."""

    parent: int
    """Index of the parent segment in the same micro-batch; -1 for a root. A parent comes before its children."""
    start: int
    length: int
    episode: int
    """Index into `TrainBatch.episodes` of the episode that owns the tokens; -1 for a shared prompt, which trains nowhere."""
    branch: int = 0
    """Which of its episode's admitted branches trains the tokens, in the order of their admission."""


class MicroBatch(Record, frozen=True, kw_only=True, eq=False):
    """Packed trees: a token attends to itself and what stands before it on the path to its root, and to nothing else."""

    columns: TokenColumns
    segments: tuple[Segment, ...]
    """They tile the columns without gap or overlap."""
    pass_tokens: int | None = None
    """Tokens that pass through a network at once: where there are more, they pass in parts, with the same gradients. None: all."""

    def positions(self) -> np.ndarray:
        """int32[T], the distance of each token from its root."""
        ends: list[int] = []
        positions = np.zeros(len(self.columns), np.int32)
        for segment in self.segments:
            first = ends[segment.parent] if segment.parent >= 0 else 0
            positions[segment.start : segment.start + segment.length] = first + np.arange(segment.length)
            ends.append(first + segment.length)
        return positions


class EpisodeShare(Record, frozen=True, kw_only=True):
    """What one episode brings to a batch."""

    episode: str
    group: int
    num_trainable: int
    reward: float | None = None
    """What its credit is made of; None where there is none."""
    truncated: bool = False
    """A length limit cut it off, so that its reward is not that of a finished attempt."""
    continued_by: tuple[int, ...] = ()
    """For each of its branches the one that goes on with its work across a compaction or a fork; -1 for none."""


class TrainBatch(Record, frozen=True, kw_only=True, eq=False):
    """The samples of one optimiser step (or of `updates_per_batch` of them), with the counts the denominators need."""

    batch: int
    """Numbers the run's batches from 0."""
    micro_batches: tuple[MicroBatch, ...]
    episodes: tuple[EpisodeShare, ...]

    @property
    def num_trainable(self) -> int:
        return sum(share.num_trainable for share in self.episodes)


ScoredColumn = Literal["logprobs", "values"]


class ScoreRequest(Record, frozen=True, kw_only=True, eq=False):
    """Ask for what the trainer's networks say of every token with a logprob or a label to imitate."""

    micro_batches: tuple[MicroBatch, ...]
    wanted: tuple[ScoredColumn, ...] = ("logprobs",)


class ScoredColumns(Record, frozen=True, kw_only=True, eq=False):
    """Per micro-batch float32[T]: NaN where the token is neither sampled nor trainable. Absent is absent, never 0: a column
    that nobody asked for, or that this trainer has no network for, is None."""

    logprobs: tuple[np.ndarray, ...] | None = None
    values: tuple[np.ndarray, ...] | None = None
    """The critic's, of the state that the token was sampled in: it has not seen the token."""
    values_after: tuple[np.ndarray, ...] | None = None
    """Of the state that the token leads to."""
    policy_version: int


class EngineMismatch(Record, frozen=True, kw_only=True):
    """How far the trainer was from what one engine of a pool recorded, over trained tokens of one age."""

    engine: int
    """Its number in the pool."""
    age: int
    """Policy versions between the one under which their turn began and the one that trains: what an engine had in its cache when
    an update came stays, so that later tokens of the turn are of both."""
    num_tokens: int
    total: float
    """Sum of |log(p0/q)| in nats."""


class TrainReport(Record, frozen=True, kw_only=True):
    batch: int
    policy_version: int
    """Grows by one per batch; the version that `publish` will name."""
    num_updates: int
    metrics: dict[str, float]
    mismatch: tuple[EngineMismatch, ...] = ()
    """By engine and age, where the tokens say which engine sampled them."""


class TrainerStatus(Record, frozen=True, kw_only=True):
    num_batches: int
    """Batches trained so far: the next one is number `num_batches`."""
    policy_version: int
    fingerprint: str


class Reconciled(Record, frozen=True, kw_only=True):
    """How the weights that a trainer came to stand against the version that was published under their number."""

    policy_version: int
    trained: str
    """Fingerprint of what the trainer came to."""
    published: str | None
    """Of what was published, which the trainer now holds; None where nothing was."""

    @property
    def adopted(self) -> bool:
        return self.published not in (None, self.trained)


class PublishedVersion(Record, frozen=True, kw_only=True):
    """A policy version that the object store holds whole."""

    version: int
    base_version: int | None
    """None for an anchor, which needs no other version."""
    size_bytes: int
    num_values: int
    num_changed: int
    fingerprint: str


# Wire ----------------------------------------------------------------------------------------------------------------

R = TypeVar("R")


def _encode_foreign(value: object) -> object:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot put a {type(value).__name__} on the wire")


def _decode_foreign(kind: type, value: object) -> object:
    if kind is np.ndarray:
        dtype, shape, raw = value  # ty: ignore[not-iterable]
        return np.frombuffer(raw, np.dtype(dtype)).reshape(shape)
    raise TypeError(f"cannot read a {kind.__name__} from the wire")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_foreign)


def encode_record(record: object) -> bytes:
    """The record as msgpack; per-token streams and arrays as raw bytes."""
    return _ENCODER.encode(record)


def decode_record(raw: bytes, kind: type[R]) -> R:
    """The record that `encode_record` wrote. Raises ValueError where `raw` is not one."""
    return msgspec.msgpack.decode(raw, type=kind, dec_hook=_decode_foreign)
