"""Per-token streams in one columnar record that slices, joins and pads itself.

A new stream is one new row in `STREAMS`; nobody keeps parallel lists by hand. Absent is absent, never 0: a token that
was not sampled has logprob NaN, version -1 and an empty kept set; a token without verdict has credit NaN, and one that
teaches no critic has returns NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import msgspec
import numpy as np

from everlong.contracts.decisions import Decisions

# T tokens, K kept ids over all tokens

NO_VERSION = -1
"""Version of a token that no policy sampled."""
NO_ENGINE = -1
"""Engine of a token that none sampled, or of which nobody said which."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One flat per-token stream: its numpy type and the value that says "absent"."""

    dtype: str
    absent: float | int | bool


STREAMS: dict[str, Stream] = {
    "ids": Stream("int32", -1),
    "sampled": Stream("bool", False),
    "trainable": Stream("bool", False),
    "logprobs": Stream("float32", np.nan),
    "versions": Stream("int32", NO_VERSION),
    "temperatures": Stream("float32", np.nan),
    "credit": Stream("float32", np.nan),
    "returns": Stream("float32", np.nan),
    "engines": Stream("int16", NO_ENGINE),
}


class KeptSets(msgspec.Struct, frozen=True, kw_only=True):
    """The ids that truncated sampling left, per token, in compressed sparse rows.

    An empty row means that nothing was truncated (the full vocabulary), or that the token was not sampled.
    Example: rows [[5], [2, 7, 9], [], [4]] are ids [5, 2, 7, 9, 4] with offsets [0, 1, 4, 4, 5].
    """

    ids: np.ndarray
    """int32[K], ascending within a row."""
    offsets: np.ndarray
    """int64[T + 1], starts with 0 and ends with K."""
    logprobs: np.ndarray | None = None
    """float32[K], the sampler's of every kept id, NaN where a part had none; None where nobody asked for them."""

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> KeptSets:
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum([len(row) for row in rows], out=offsets[1:])
        ids = np.fromiter((i for row in rows for i in sorted(row)), np.int32, count=int(offsets[-1]))
        return cls(ids=ids, offsets=offsets)

    @classmethod
    def empty(cls, num_tokens: int) -> KeptSets:
        return cls(ids=np.zeros(0, np.int32), offsets=np.zeros(num_tokens + 1, np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, token: int) -> np.ndarray:
        return self.ids[self.offsets[token] : self.offsets[token + 1]]

    def slice(self, start: int, stop: int) -> KeptSets:
        offsets = self.offsets[start : stop + 1]
        kept = slice(offsets[0], offsets[-1])
        logprobs = None if self.logprobs is None else self.logprobs[kept]
        return KeptSets(ids=self.ids[kept], offsets=offsets - offsets[0], logprobs=logprobs)

    @staticmethod
    def join(parts: Sequence[KeptSets]) -> KeptSets:
        if not parts:
            return KeptSets.empty(0)
        shifts = np.cumsum([0, *(len(part.ids) for part in parts)])
        offsets = [np.zeros(1, np.int64)]
        offsets += [part.offsets[1:] + shift for part, shift in zip(parts, shifts, strict=False)]
        logprobs = None
        if any(part.logprobs is not None for part in parts):
            nothing = [np.full(len(part.ids), np.nan, np.float32) for part in parts]
            known = [n if part.logprobs is None else part.logprobs for part, n in zip(parts, nothing, strict=True)]
            logprobs = np.concatenate(known)
        ids = np.concatenate([part.ids for part in parts])
        return KeptSets(ids=ids, offsets=np.concatenate(offsets), logprobs=logprobs)

    @property
    def size_bytes(self) -> int:
        return self.ids.nbytes + self.offsets.nbytes + (0 if self.logprobs is None else self.logprobs.nbytes)

    def without_logprobs(self) -> KeptSets:
        return KeptSets(ids=self.ids, offsets=self.offsets)


@dataclass(frozen=True, slots=True, eq=False)
class TokenColumns:
    """What is known of each of T tokens, one array per stream, all of length T.

    Example: TokenColumns.context([20, 21]) + TokenColumns.sampled_tokens([5, 6], [-0.1, -0.2], version=3)
    """

    ids: np.ndarray
    sampled: np.ndarray
    trainable: np.ndarray
    logprobs: np.ndarray
    """float32[T], of the processed sampling distribution (after temperature and truncation); NaN where not sampled."""
    versions: np.ndarray
    """int32[T], the policy version that sampled the token; `NO_VERSION` where none did."""
    temperatures: np.ndarray
    """float32[T], at which the token was sampled and must be scored; NaN where not sampled."""
    credit: np.ndarray
    """float32[T], advantage per token; NaN where there is no verdict."""
    kept: KeptSets = field(default_factory=lambda: KeptSets.empty(0))
    engines: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int16))
    """int16[T], number of the engine of a pool that sampled the token; `NO_ENGINE` where none did or a run has only one. Left
    out, as in episodes stored before there were pools, it is absent."""
    returns: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """float32[T], what a critic's value of the state before the token is pulled to; NaN where none learns from it, and everywhere
    where the stream is left out, as in records that are older than it."""
    decisions: Decisions = field(default_factory=lambda: Decisions(num_tokens=0))
    """What the network chose for the token before this one, as far as a run replays it; left out, nothing is recorded."""

    def __post_init__(self) -> None:
        if not len(self.engines) and len(self.ids):
            object.__setattr__(self, "engines", np.full(len(self.ids), NO_ENGINE, np.int16))
        if not len(self.returns) and len(self.ids):
            object.__setattr__(self, "returns", np.full(len(self.ids), np.nan, np.float32))
        if not len(self.decisions) and len(self.ids) and not self.decisions.rows:
            object.__setattr__(self, "decisions", Decisions(num_tokens=len(self.ids)))
        lengths = {name: len(getattr(self, name)) for name in (*STREAMS, "kept", "decisions")}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"every per-token stream needs the length of the ids, got {lengths}: refuse the record")
        for name, stream in STREAMS.items():
            if getattr(self, name).dtype != stream.dtype:
                raise ValueError(f"stream {name} must be {stream.dtype}, got {getattr(self, name).dtype}")
        self.decisions.check()

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenColumns):
            return NotImplemented
        if self.decisions.rows.keys() != other.decisions.rows.keys():
            return False
        mine, theirs = (
            [getattr(columns, name) for name in STREAMS]
            + [columns.kept.ids, columns.kept.offsets, np.asarray(columns.kept.logprobs, np.float32)]
            + [columns.decisions.rows[name] for name in self.decisions.rows]
            for columns in (self, other)
        )
        return all(a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in zip(mine, theirs, strict=True))

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def empty(cls) -> TokenColumns:
        return cls.context([])

    @classmethod
    def context(cls, ids: Sequence[int] | np.ndarray, decisions: Decisions | None = None) -> TokenColumns:
        """Tokens the policy did not sample: prompts, tool output, turn separators. Never trained."""
        ids = np.asarray(ids, np.int32)
        columns = {name: np.full(len(ids), s.absent, s.dtype) for name, s in STREAMS.items() if name != "ids"}
        decisions = Decisions(num_tokens=len(ids)) if decisions is None else decisions
        return cls(ids=ids, kept=KeptSets.empty(len(ids)), decisions=decisions, **columns)

    @classmethod
    def sampled_tokens(
        cls,
        ids: Sequence[int] | np.ndarray,
        logprobs: Sequence[float] | np.ndarray,
        *,
        version: int | Sequence[int] | np.ndarray,
        temperature: float = 1.0,
        kept: KeptSets | None = None,
        decisions: Decisions | None = None,
    ) -> TokenColumns:
        """Tokens the policy sampled: trainable, with the logprob under which each was drawn.

        Raises ValueError when a stream is out of step, a logprob is not finite or positive, or a kept set lacks its token.
        """
        ids = np.asarray(ids, np.int32)
        logprobs = np.asarray(logprobs, np.float32)
        if len(logprobs) != len(ids):
            raise ValueError(f"{len(ids)} sampled ids came with {len(logprobs)} logprobs: refuse, never fill with 0")
        if not np.all(np.isfinite(logprobs)) or np.any(logprobs > 1e-6):
            raise ValueError("logprobs of sampled tokens must be finite and at most 0")
        versions = np.full(len(ids), version, np.int32) if np.isscalar(version) else np.asarray(version, np.int32)
        kept = KeptSets.empty(len(ids)) if kept is None else kept
        columns = cls(
            ids=ids,
            sampled=np.ones(len(ids), bool),
            trainable=np.ones(len(ids), bool),
            logprobs=logprobs,
            versions=versions,
            temperatures=np.full(len(ids), temperature, np.float32),
            credit=np.full(len(ids), np.nan, np.float32),
            kept=kept,
            decisions=Decisions(num_tokens=len(ids)) if decisions is None else decisions,
        )
        columns._check_kept()
        return columns

    @classmethod
    def supervised(cls, ids: Sequence[int] | np.ndarray) -> TokenColumns:
        """Tokens to imitate: trainable but not sampled, so they have no logprob and no version."""
        return cls.context(ids).replace(trainable=np.ones(len(ids), bool))

    def outside_kept(self) -> np.ndarray:
        """int64[N]: the tokens whose recorded kept set does not hold their own id exactly once."""
        sizes = np.diff(self.kept.offsets)
        truncated = np.flatnonzero(sizes)
        if not truncated.size:
            return truncated
        hits = np.repeat(self.ids, sizes) == self.kept.ids
        return truncated[np.add.reduceat(hits, self.kept.offsets[truncated]) != 1]

    def _check_kept(self) -> None:
        for token in self.outside_kept()[:1]:
            raise ValueError(f"kept set of token {token} lacks the sampled id {self.ids[token]}: refuse the record")

    def replace(self, **streams: np.ndarray | KeptSets | Decisions) -> TokenColumns:
        return TokenColumns(**{f.name: streams.get(f.name, getattr(self, f.name)) for f in fields(self)})

    def slice(self, start: int, stop: int) -> TokenColumns:
        start, stop, _ = slice(start, stop).indices(len(self))
        stop = max(start, stop)
        columns = {name: getattr(self, name)[start:stop] for name in STREAMS}
        return TokenColumns(kept=self.kept.slice(start, stop), decisions=self.decisions.slice(start, stop), **columns)

    def __add__(self, other: TokenColumns) -> TokenColumns:
        return TokenColumns.join([self, other])

    @staticmethod
    def join(parts: Sequence[TokenColumns]) -> TokenColumns:
        if not parts:
            return TokenColumns.empty()
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in STREAMS}
        return TokenColumns(
            kept=KeptSets.join([part.kept for part in parts]),
            decisions=Decisions.join([part.decisions for part in parts]),
            **columns,
        )

    def freeze(self) -> TokenColumns:
        """The same tokens, trained nowhere: what a second branch carries of tokens that a first one trains."""
        return self.replace(trainable=np.zeros(len(self), bool))

    def with_credit(self, credit: float | None) -> TokenColumns:
        """The same tokens with one credit on every trainable one; None (no verdict) leaves NaN, which never trains."""
        value = np.nan if credit is None else credit
        return self.replace(credit=np.where(self.trainable, np.float32(value), np.float32(np.nan)).astype(np.float32))

    def pad(self, length: int, pad_id: int) -> tuple[TokenColumns, np.ndarray]:
        """Padded to `length`, and bool[length] that says which positions hold a token.

        The mask follows from the length, never from the value of an id, so a pad id may equal the end-of-turn id.
        """
        if length < len(self):
            raise ValueError(f"cannot pad {len(self)} tokens to {length}")
        attention = np.arange(length) < len(self)
        padding = TokenColumns.context(np.full(length - len(self), pad_id, np.int32))
        return self + padding, attention

    @property
    def num_sampled(self) -> int:
        return int(self.sampled.sum())

    @property
    def num_trainable(self) -> int:
        return int(self.trainable.sum())
