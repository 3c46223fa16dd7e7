"""Main of the worker process: builds a cell from a factory path and answers calls until the control process is gone.

    python -m everlong.orchestrator.cells.worker --socket-fd N --factory package.module:function --config FILE --lock FILE

The factory gets the config file's path and returns a `Cell`. The lock file lets one worker at a time touch a run: a
worker whose control process was killed ends as soon as its socket closes, and its successor waits for that.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import os
import socket
import sys
import traceback
from dataclasses import dataclass
from typing import Any

from everlong.contracts.import_path import load_named
from everlong.contracts.ports import Engine, Trainer
from everlong.orchestrator.cells.frames import (
    METHODS,
    PING,
    Answer,
    Call,
    decode_value,
    encode_value,
    failure_of,
    read_frame,
    write_frame,
)


@dataclass(slots=True)
class Cell:
    """What a worker hosts."""

    engine: Engine | None
    """None in a cell that only trains."""
    trainer: Trainer | None
    """None in a cell that only samples."""

    async def call(self, method: str, argument: Any) -> Any:
        """Raises ValueError for a method that this cell does not have."""
        if method == PING:
            return None
        port_name, name = method.split(".")
        port = getattr(self, port_name)
        if port is None:
            raise ValueError(f"this cell has no {port_name}: it cannot {name}")
        takes, _ = METHODS[method]
        return await (getattr(port, name)() if takes is None else getattr(port, name)(argument))

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()
        if self.trainer is not None:
            await self.trainer.close()


async def _answer(cell: Cell, call: Call, writer: asyncio.StreamWriter) -> None:
    try:
        takes, gives = METHODS[call.method]
        value = await cell.call(call.method, decode_value(call.argument, takes))
        frame = Answer(call.id, encode_value(value if gives is not None else None))
    except Exception as error:
        frame = failure_of(call.id, error)
    write_frame(writer, frame)
    await writer.drain()


async def serve(cell: Cell, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer calls, each in its own task, until the other side is gone."""
    tasks: set[asyncio.Task[None]] = set()
    while True:
        try:
            call = await read_frame(reader)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return
        assert isinstance(call, Call)
        task = asyncio.create_task(_answer(cell, call, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _main(socket_fd: int, factory: str, config: str) -> None:
    os.set_inheritable(socket_fd, False)
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=socket_fd), limit=1 << 26)
    try:
        cell = load_named(factory)(config)
    except Exception as error:
        write_frame(writer, failure_of(0, error))
        await writer.drain()
        raise
    write_frame(writer, Answer(0, encode_value(os.getpid())))
    await serve(cell, reader, writer)


def main() -> None:
    parser = argparse.ArgumentParser(prog="everlong-worker", description=__doc__)
    parser.add_argument("--socket-fd", type=int, required=True)
    for name in ("factory", "config", "lock"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    with open(args.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            asyncio.run(_main(args.socket_fd, args.factory, args.config))
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        # The compute thread may be inside a long step for nobody: leave without waiting for it.
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
