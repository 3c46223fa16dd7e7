"""Starts the launcher for one command and reads how the command ended."""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from everlong.contracts.errors import SandboxError
from everlong.contracts.ports import ExecResult

LAUNCHER = Path(__file__).with_name("launcher.py")
GRACE_S = 30.0
"""The launcher keeps the time limit; one that says nothing for so much longer is broken."""
_STOP_S = 5.0

Field = str | bytes | int | float | bool | list[str] | dict[str, str] | list[tuple[str, str]]
Request = Mapping[str, Field]


def python_candidates() -> list[str]:
    """Interpreters for the launcher: the system's first, as ours may lie in a home that others cannot read."""
    found = [path for path in ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable) if path]
    return [path for path in found if os.access(path, os.X_OK)]


async def compile_program(python: str, folder: Path, program: Path = LAUNCHER) -> Path:
    """The launcher as bytecode of that interpreter, which saves a quarter of every start. Raises SandboxError."""
    target = folder / f"{program.stem}-{python.strip('/').replace('/', '-')}.pyc"
    code = "import ctypes, py_compile, sys; py_compile.compile(sys.argv[1], sys.argv[2], sys.argv[1].split('/')[-1], doraise=True)"
    try:
        process = await asyncio.create_subprocess_exec(
            *(python, "-I", "-S", "-c", code, str(program), str(target)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise SandboxError(f"cannot start {python}: {error.strerror}") from error
    _, trouble = await process.communicate()
    if process.returncode:
        raise SandboxError(f"{python} cannot run {program.name}: {trouble.decode(errors='replace').strip()[-300:]}")
    return target


class Launch:
    """One run of the launcher. `stop` ends it and everything below it; so does the end of this process.

    `argv`: what starts it; `cwd`: a folder of the host to start it in.
    """

    def __init__(self, argv: tuple[str, ...], cwd: Path, request: Request, timeout_s: float) -> None:
        self._argv, self._cwd, self._request, self._timeout_s = argv, cwd, request, timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._stopped = False
        self._limit: asyncio.Timeout | None = None
        self._told = False
        self._left_s: float | None = None
        """Of the time limit, while it is paused."""

    def stop(self) -> None:
        self._stopped = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def pause(self) -> None:
        """Make everything below it stand still, its time limit too."""
        if self._left_s is None:
            deadline = self._limit.when() if self._limit is not None else None
            now = asyncio.get_running_loop().time()
            self._left_s = self._timeout_s + GRACE_S if deadline is None else deadline - now
            if self._limit is not None:
                self._limit.reschedule(None)
            self._say(b"p")

    def resume(self) -> None:
        if self._left_s is not None:
            if self._limit is not None:
                self._limit.reschedule(asyncio.get_running_loop().time() + self._left_s)
            self._left_s = None
            self._say(b"c")

    def _say(self, word: bytes) -> None:
        if self._told and self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._process.stdin.write(word)

    async def run(self) -> ExecResult | None:
        """None when it was stopped. Raises SandboxError when the command could not be started or the launcher broke."""
        if self._stopped:
            return None
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={"LC_ALL": "C.UTF-8"},
                # Its command line is visible inside the sandbox and must not say where we live.
                cwd=self._cwd,
                start_new_session=True,
            )
        except OSError as error:
            raise SandboxError(f"cannot start {self._argv[0]}: {error.strerror}") from error
        try:
            async with asyncio.timeout(self._timeout_s + GRACE_S) as self._limit:
                if self._left_s is not None:
                    self._limit.reschedule(None)
                reply, trouble = await self._talk(self._process)
        except TimeoutError:
            raise SandboxError(f"the launcher did not answer within {self._timeout_s + GRACE_S:g} s") from None
        finally:
            await asyncio.shield(self._end(self._process))
        if self._stopped and not reply:
            return None
        return _parse(reply, trouble)

    async def _talk(self, process: asyncio.subprocess.Process) -> tuple[bytes, bytes]:
        """Standard input stays open: its end is the sign to stop."""
        assert process.stdin and process.stdout and process.stderr
        body = marshal.dumps(dict(self._request), 2)
        try:
            process.stdin.write(len(body).to_bytes(4, "little") + body)
            self._told = True
            if self._left_s is not None:
                process.stdin.write(b"p")
            await process.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            pass  # what it said on standard error tells why
        if self._stopped:
            process.stdin.close()
        return await asyncio.gather(process.stdout.read(), process.stderr.read())

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        """The launcher ends only after everything below it is dead, so waiting for it is enough."""
        assert process.stdin
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _STOP_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def _parse(reply: bytes, trouble: bytes) -> ExecResult:
    header, _, output = reply.partition(b"\n")
    kind, _, rest = header.partition(b" ")
    if kind == b"failed":
        raise SandboxError(f"the sandbox could not start the command: {rest.decode(errors='replace')}")
    if kind != b"done":
        said = trouble.decode(errors="replace").strip()[-1000:]
        raise SandboxError(f"the launcher ended without an answer{': ' + said if said else ', something killed it'}")
    exit_code, timed_out, truncated, memory_exceeded, elapsed_us = (int(number) for number in rest.split())
    return ExecResult(
        exit_code=exit_code,
        output=output,
        timed_out=bool(timed_out),
        truncated=bool(truncated),
        memory_exceeded=bool(memory_exceeded),
        elapsed_s=elapsed_us / 1e6,
    )
