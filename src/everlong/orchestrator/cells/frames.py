"""Calls and answers on the socket between control and worker: length-prefixed msgpack, many calls in flight.

The table of methods is the whole protocol: what goes in, what comes out.
"""

from __future__ import annotations

import asyncio
import struct
import traceback
from typing import Any

import msgspec

from everlong.contracts import errors
from everlong.contracts.errors import EverlongError
from everlong.contracts.os_errors import explain_os_error
from everlong.contracts.records import (
    EngineMismatch,
    EngineStatus,
    GenerateReply,
    GenerateRequest,
    MemberStatus,
    PublishedVersion,
    Reconciled,
    ScoredColumns,
    ScoreRequest,
    TrainBatch,
    TrainerStatus,
    TrainReport,
    decode_record,
    encode_record,
)

PING = "cell.ping"
"""Asks a cell nothing, to hear from its process."""

METHODS: dict[str, tuple[Any, Any]] = {
    PING: (None, None),
    "engine.generate": (GenerateRequest, GenerateReply),
    "engine.abort": (tuple[str, ...], None),
    "engine.update": (int, EngineStatus),
    "engine.status": (None, EngineStatus),
    "engine.judge": (tuple[EngineMismatch, ...], tuple[MemberStatus, ...]),
    "trainer.train": (TrainBatch, TrainReport),
    "trainer.score": (ScoreRequest, ScoredColumns),
    "trainer.save": (None, TrainerStatus),
    "trainer.restore": (int | None, TrainerStatus),
    "trainer.reconcile": (None, Reconciled),
    "trainer.publish": (None, PublishedVersion),
    "trainer.export": (str, None),
}
"""Method name to (type of the argument, type of the answer); None for none."""

_LENGTH = struct.Struct("<I")


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    id: int
    method: str
    argument: bytes


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    id: int
    value: bytes


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """A call that raised. `kind` is the name of a class of `contracts.errors`, "ValueError" or "OSError"."""

    id: int
    kind: str
    message: str
    trace: str


Frame = Call | Answer | Failure


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """Raises asyncio.IncompleteReadError when the other side is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return decode_record(await reader.readexactly(length), Frame)  # ty: ignore[invalid-argument-type]


def write_frame(writer: asyncio.StreamWriter, frame: Frame) -> None:
    raw = encode_record(frame)
    writer.write(_LENGTH.pack(len(raw)))
    writer.write(raw)


def encode_value(value: object) -> bytes:
    return encode_record(value)


def decode_value(raw: bytes, kind: Any) -> Any:
    return decode_record(raw, kind if kind is not None else type(None))


def failure_of(call_id: int, error: BaseException) -> Failure:
    known = isinstance(error, EverlongError | ValueError)
    kind = type(error).__name__ if known and hasattr(errors, type(error).__name__) else ""
    if isinstance(error, ValueError):
        kind = "ValueError"
    if isinstance(error, OSError):
        return Failure(call_id, "OSError", explain_os_error(error), "")
    return Failure(call_id, kind, str(error) or repr(error), "".join(traceback.format_exception(error)))


def error_of(failure: Failure, method: str) -> Exception:
    """The exception that the other side raised, by its class; a class not in the contract becomes a WorkerError."""
    if failure.kind in ("ValueError", "OSError"):
        return {"ValueError": ValueError, "OSError": OSError}[failure.kind](failure.message)
    kind = getattr(errors, failure.kind, None) if failure.kind else None
    if kind is not None:
        return kind(failure.message)
    return errors.WorkerError(f"{method} failed in the worker:\n{failure.trace}")
