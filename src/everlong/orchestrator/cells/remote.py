"""The control process's end of a cell: `RemoteEngine` and `RemoteTrainer` implement the ports by messages."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from everlong.contracts.errors import WorkerDied
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
)
from everlong.orchestrator.cells.frames import (
    METHODS,
    PING,
    Answer,
    Call,
    Failure,
    decode_value,
    encode_value,
    error_of,
    read_frame,
    write_frame,
)
from everlong.orchestrator.cells.heartbeat import BEAT_S, Heartbeat

PING_ID = 0
"""Of every ping; calls count from 1."""


class Connection:
    """Calls over one socket, many in flight. When the other side is gone every waiting and later call raises WorkerDied."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heartbeat: Heartbeat) -> None:
        self._reader, self._writer, self._heartbeat = reader, writer, heartbeat
        self._heard = self._asked = False
        """Since the last beat; whether a ping is under way."""
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the worker is gone."""
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]

    async def call(self, method: str, argument: object = None) -> Any:
        if self.lost.done():
            raise WorkerDied(f"{method}: the worker is gone")
        call_id = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = (method, future)
        write_frame(self._writer, Call(call_id, method, encode_value(argument)))
        try:
            await self._writer.drain()
            return await future
        except ConnectionError as error:
            raise WorkerDied(f"{method}: the worker is gone ({error})") from error
        finally:
            self._waiting.pop(call_id, None)

    async def _read(self) -> None:
        try:
            while True:
                frame = await read_frame(self._reader)
                self._heard = True
                self._settle(frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.lost.set_result(None)
            for method, future in self._waiting.values():
                if not future.done():
                    future.set_exception(WorkerDied(f"{method}: the worker died while the call was waiting"))

    async def _beat(self) -> None:
        """Ask now and then, one question at a time, and tell the heartbeat whether anything came."""
        while not self.lost.done():
            if not self._asked:
                self._asked = True
                write_frame(self._writer, Call(PING_ID, PING, encode_value(None)))
            await asyncio.wait({self.lost}, timeout=BEAT_S)
            self._heartbeat.beat(self._heard or self.lost.done(), BEAT_S)
            self._heard = False

    def _settle(self, frame: Answer | Failure | Call) -> None:
        self._asked = self._asked and frame.id != PING_ID
        method, future = self._waiting.get(frame.id, ("", None))
        if future is None or future.done():
            return  # the caller was cancelled
        if isinstance(frame, Failure):
            future.set_exception(error_of(frame, method))
        elif isinstance(frame, Answer):
            future.set_result(decode_value(frame.value, METHODS[method][1]))

    async def close(self) -> None:
        self._writer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class RemoteEngine:
    """An engine in another process, or a pool of them. A cancelled `generate` is aborted there."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        try:
            return await self._call("engine.generate", request)
        except asyncio.CancelledError:
            await asyncio.shield(self._call("engine.abort", (request.request_id,)))
            raise

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        await self._call("engine.abort", request_ids)

    async def update(self, policy_version: int) -> EngineStatus:
        return await self._call("engine.update", policy_version)

    async def status(self) -> EngineStatus:
        return await self._call("engine.status")

    async def judge(self, mismatch: tuple[EngineMismatch, ...]) -> tuple[MemberStatus, ...]:
        """Only where the engine is a pool."""
        return await self._call("engine.judge", mismatch)

    async def close(self) -> None:
        """The cell lives as long as its process; the supervisor ends that."""


class RemoteTrainer:
    """A trainer in another process."""

    def __init__(self, connection: Connection) -> None:
        self._call = connection.call

    async def train(self, batch: TrainBatch) -> TrainReport:
        return await self._call("trainer.train", batch)

    async def score(self, request: ScoreRequest) -> ScoredColumns:
        return await self._call("trainer.score", request)

    async def save(self) -> TrainerStatus:
        return await self._call("trainer.save")

    async def restore(self, num_batches: int | None = None) -> TrainerStatus:
        return await self._call("trainer.restore", num_batches)

    async def reconcile(self) -> Reconciled:
        return await self._call("trainer.reconcile")

    async def publish(self) -> PublishedVersion:
        return await self._call("trainer.publish")

    async def export(self, folder: str) -> None:
        await self._call("trainer.export", folder)

    async def close(self) -> None:
        """The cell lives as long as its process; the supervisor ends that."""
