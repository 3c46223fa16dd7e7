"""Starts the worker process, waits until it is ready, ends it, and says what it printed when it died."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from everlong.contracts.errors import WorkerDied
from everlong.orchestrator.cells.frames import Failure, error_of, read_frame
from everlong.orchestrator.cells.heartbeat import Heartbeat
from everlong.orchestrator.cells.remote import Connection, RemoteEngine, RemoteTrainer


class WorkerProcess:
    """One cell in its own process."""

    def __init__(self, process: asyncio.subprocess.Process, connection: Connection, log: Path) -> None:
        self.process, self.connection, self.log = process, connection, log
        self.engine, self.trainer = RemoteEngine(connection), RemoteTrainer(connection)

    @property
    def pid(self) -> int:
        return self.process.pid

    @classmethod
    async def start(
        cls,
        *,
        factory: str,
        config: Path,
        run_folder: Path,
        environment: Mapping[str, str],
        name: str = "worker",
        timeout_s: float = 300.0,
    ) -> WorkerProcess:
        """`name` is that of its log and its lock: one worker of a name at a time works for a run.

        Raises what the factory raised, or WorkerDied with the end of the worker's log."""
        log = run_folder / f"{name}.log"
        # A pair of sockets has no name that a killed process could leave behind.
        ours, theirs = socket.socketpair()
        with theirs:
            process = await _spawn(factory, config, theirs.fileno(), log, environment)
        writer = None
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 26)
            ready = await _first(read_frame(reader), process, timeout_s, log)
        except BaseException:
            (writer or ours).close()
            if process.returncode is None:
                process.kill()
                await process.wait()
            raise
        if isinstance(ready, Failure):
            writer.close()
            await process.wait()
            raise error_of(ready, "building the cell")
        return cls(process, Connection(reader, writer, _heartbeat(name, process.pid, log)), log)

    async def close(self) -> None:
        """End the worker; what it holds and nobody saved is gone."""
        await self.connection.close()
        try:
            await asyncio.wait_for(self.process.wait(), 5.0)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


def _heartbeat(name: str, pid: int, log: Path) -> Heartbeat:
    advice = (
        f"it was stopped (`kill -CONT {pid}` lets it go on) or it hangs, and the run waits for it. Its log is {log}; "
        f"Ctrl-C ends the run, `everlong resume {log.parent}` goes on from what is stored"
    )
    return Heartbeat(f"the {name} process (pid {pid})", advice)


async def _spawn(
    factory: str, config: Path, socket_fd: int, log: Path, environment: Mapping[str, str]
) -> asyncio.subprocess.Process:
    argv = [sys.executable, "-m", "everlong.orchestrator.cells.worker"]
    argv += [
        "--socket-fd",
        str(socket_fd),
        "--factory",
        factory,
        "--config",
        str(config),
        "--lock",
        str(log.with_suffix(".lock")),
    ]
    with log.open("ab") as out:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, **environment},
            pass_fds=(socket_fd,),
            start_new_session=True,  # Ctrl-C in a terminal is ours to answer: the worker ends when we hang up
        )


async def _first(awaitable, process: asyncio.subprocess.Process, timeout_s: float, log: Path):
    """The awaitable's result, unless the process ends first."""
    wanted, ended = asyncio.ensure_future(awaitable), asyncio.ensure_future(process.wait())
    try:
        done, _ = await asyncio.wait({wanted, ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if wanted in done and wanted.exception() is None:
            return wanted.result()
        if wanted in done:  # it hung up: what it has to say is its exit code
            await asyncio.wait({ended}, timeout=5.0)
    finally:
        wanted.cancel()
        ended.cancel()
        await asyncio.gather(wanted, ended, return_exceptions=True)
    state = f"was not ready after {timeout_s:.0f} s" if not done else f"ended with code {process.returncode}"
    tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
    raise WorkerDied(f"the worker {state}; the end of its log {log}:\n{tail}")
