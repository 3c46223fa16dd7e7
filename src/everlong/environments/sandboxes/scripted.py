"""Sandboxes without processes: files in memory, commands answered by a function, time that only moves when told to.

For tests of everything above sandboxes and for the scripted loop. Without a function it knows what a scripted agent needs:
`echo WORDS`, `echo WORDS > FILE`, `echo WORDS >> FILE` and `cat FILE...`, also as `bash -c "..."`, joined by `;`, `&&` or lines.
"""

from __future__ import annotations

import itertools
import math
import posixpath
import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec

from everlong.contracts.errors import SandboxError
from everlong.contracts.ports import Capabilities, Command, ExecResult, PauseTo, SandboxSpec, Snapshot
from everlong.environments.sandboxes.folders import is_below
from everlong.environments.sandboxes.layout import check_names, check_spec, private_folders, unknown_snapshot

Respond = Callable[["ScriptedSandbox", Command], ExecResult]


class ScriptedSandbox:
    """`files` maps absolute paths to content and may be read and changed by whoever answers commands."""

    def __init__(self, backend: ScriptedBackend, spec: SandboxSpec, files: dict[str, bytes]) -> None:
        self._backend, self.spec, self.files = backend, spec, files
        self.commands: list[Command] = []
        self._deadline = math.inf if spec.ttl_s is None else backend.now_s + spec.ttl_s
        self._closed = ""
        self._paused = False
        self._death: str | None = None
        self._dies_in = math.inf

    @property
    def name(self) -> str:
        return self.spec.name

    def die(self, reason: str = "it was told to die", *, after_commands: int = 0) -> None:
        """Every call after so many more commands raises SandboxError, as with a sandbox whose machine is gone."""
        self._death, self._dies_in = reason, after_commands

    async def exec(self, command: Command) -> ExecResult:
        if not command.argv or not (0 < command.timeout_s < math.inf):
            raise ValueError(f"a command needs an argv and a finite timeout_s > 0, got {command}")
        if command.keep_processes:
            raise ValueError("a scripted sandbox has no processes to keep: leave keep_processes out")
        self._check_open()
        self._dies_in -= 1
        self.commands.append(command)
        result = self._backend.respond(self, command)
        self._backend.now_s += result.elapsed_s
        self._check_expiry()
        return cut(result, self.spec.limits.output_bytes)

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        self._check_open()
        full = self.resolve(path)
        if full not in self.files:
            raise FileNotFoundError(2, "no such file in the scripted sandbox", full)
        return self.files[full][:max_bytes]

    async def write(self, path: str, data: bytes) -> None:
        self._check_open()
        self.files[self.resolve(path)] = bytes(data)

    async def fork(self, spec: SandboxSpec) -> ScriptedSandbox:
        if spec.files is not None:
            raise ValueError(f"a fork starts from its parent's workdir: spec.files must be None, got {spec.files!r}")
        self._check_open()
        base = self.spec.workdir
        copied = {spec.workdir + path[len(base) :]: data for path, data in self.files.items() if is_below(path, base)}
        return self._backend.open(spec, copied)

    async def pause(self, to: PauseTo = "stopped") -> None:
        if not self._paused:
            self._check_open()
            self._paused = True

    async def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._check_open()

    async def snapshot(self, parent: Snapshot | None = None) -> Snapshot:
        self._check_open()
        return self._backend.keep(self, parent)

    async def rollback(self, snapshot: Snapshot) -> None:
        self._check_open()
        self.files = dict(self._backend.kept(snapshot)[1])

    async def close(self) -> None:
        if not self._closed:
            self._closed = "close was called"
            self.files = {}
            self._backend.sandboxes.pop(self.name, None)

    def resolve(self, path: str, cwd: str = "") -> str:
        """The absolute path; raises SandboxError where it is not in a folder that may be read and written from outside."""
        full = posixpath.normpath(posixpath.join(self.spec.workdir, cwd, path))
        if not any(is_below(full, folder) for folder in private_folders(self.spec)):
            raise SandboxError(f"{path} leads to {full}, out of what can be read and written from outside")
        return full

    def _check_open(self) -> None:
        self._check_expiry()
        if self._death is not None and self._dies_in <= 0:
            raise SandboxError(f"sandbox {self.name} died: {self._death}")
        if self._closed:
            raise SandboxError(f"sandbox {self.name} is closed: {self._closed}")
        if self._paused:
            raise SandboxError(f"sandbox {self.name} is paused: resume it first")

    def _check_expiry(self) -> None:
        if self._backend.now_s >= self._deadline:
            self._backend.sandboxes.pop(self.name, None)
            raise SandboxError(f"sandbox {self.name} is closed: its ttl of {self.spec.ttl_s:g} s is over")


class ScriptedBackend:
    """`now_s` is its clock: seconds that pass only by what `respond` says a command took, and by assignment."""

    def __init__(self, respond: Respond | None = None, scratch: Path | None = None) -> None:
        self.respond: Respond = respond or interpret
        self.scratch = scratch
        self.now_s = 0.0
        self.sandboxes: dict[str, ScriptedSandbox] = {}
        self._kept: dict[str, tuple[SandboxSpec, dict[str, bytes]]] = {}
        self._ids = itertools.count()

    async def probe(self) -> Capabilities:
        return Capabilities(
            isolation="none",
            network_off=True,
            memory_limit=False,
            process_limit=False,
            pause_to_disk=True,
            reason="scripted: no process is ever started, so nothing needs isolation",
        )

    async def create(self, spec: SandboxSpec) -> ScriptedSandbox:
        return self.open(spec, _load(Path(spec.files), spec.workdir) if spec.files is not None else {})

    def open(self, spec: SandboxSpec, files: dict[str, bytes]) -> ScriptedSandbox:
        check_spec(spec)
        if spec.name in self.sandboxes:
            raise SandboxError(f"a sandbox named {spec.name!r} is open already: names are unique within a backend")
        self.sandboxes[spec.name] = ScriptedSandbox(self, spec, files)
        return self.sandboxes[spec.name]

    async def restore(self, snapshot: Snapshot, names: tuple[str, ...]) -> list[ScriptedSandbox]:
        spec, files = self.kept(snapshot)
        check_names(names, self.sandboxes)
        return [self.open(msgspec.structs.replace(spec, name=name), dict(files)) for name in names]

    async def drop(self, snapshot: Snapshot) -> None:
        self._kept.pop(snapshot.id, None)

    def keep(self, sandbox: ScriptedSandbox, parent: Snapshot | None) -> Snapshot:
        if parent is not None:
            self.kept(parent)
        snapshot = Snapshot(
            id=str(next(self._ids)), sandbox=sandbox.name, parent=parent.id if parent is not None else None
        )
        self._kept[snapshot.id] = (sandbox.spec, dict(sandbox.files))
        return snapshot

    def kept(self, snapshot: Snapshot) -> tuple[SandboxSpec, dict[str, bytes]]:
        if snapshot.id not in self._kept:
            raise unknown_snapshot(snapshot)
        return self._kept[snapshot.id]

    async def close(self) -> None:
        for sandbox in list(self.sandboxes.values()):
            await sandbox.close()


def _load(folder: Path, workdir: str) -> dict[str, bytes]:
    """Regular files only: a link has no meaning in a dict of contents."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            found[posixpath.join(workdir, path.relative_to(folder).as_posix())] = path.read_bytes()
    return found


def cut(result: ExecResult, output_bytes: int) -> ExecResult:
    if len(result.output) <= output_bytes:
        return result
    return ExecResult(
        exit_code=result.exit_code,
        output=result.output[:output_bytes],
        timed_out=result.timed_out,
        truncated=True,
        memory_exceeded=result.memory_exceeded,
        elapsed_s=result.elapsed_s,
    )


def interpret(sandbox: ScriptedSandbox, command: Command) -> ExecResult:
    """The commands that the module names; anything else ends with 127 as an unknown program does."""
    argv = list(command.argv)
    if argv[0] in ("bash", "sh") and len(argv) >= 3 and argv[1] in ("-c", "-lc"):
        return _run_script(sandbox, argv[2], command.cwd or "")
    code, output = _run_words(sandbox, argv, command.cwd or "")
    return ExecResult(exit_code=code, output=output)


def _run_script(sandbox: ScriptedSandbox, script: str, cwd: str) -> ExecResult:
    code, output = 0, b""
    lexer = shlex.shlex(script, posix=True, punctuation_chars=";&>\n")
    lexer.whitespace, lexer.whitespace_split = " \t\r", True
    try:
        tokens = list(lexer)
    except ValueError as error:
        return ExecResult(exit_code=2, output=f"sh: {error}\n".encode())
    words: list[str] = []
    for token in [*tokens, ";"]:
        if token != "&&" and not set(token) <= {";", "\n"}:
            words.append(token)
            continue
        if words:
            code, said = _run_words(sandbox, words, cwd)
            output += said
        words = []
        if token == "&&" and code:
            break
    return ExecResult(exit_code=code, output=output)


def _run_words(sandbox: ScriptedSandbox, words: list[str], cwd: str) -> tuple[int, bytes]:
    target, append = None, False
    if len(words) >= 2 and words[-2] in (">", ">>"):
        target, append = words[-1], words[-2] == ">>"
        words = words[:-2]
    try:
        if not words or words[0] not in ("echo", "cat"):
            return 127, f"{words[0] if words else ''}: not found\n".encode()
        output = _echo(words[1:]) if words[0] == "echo" else _cat(sandbox, words[1:], cwd)
        if target is None:
            return 0, output
        path = sandbox.resolve(target, cwd)
        sandbox.files[path] = (sandbox.files.get(path, b"") if append else b"") + output
        return 0, b""
    except (SandboxError, FileNotFoundError) as error:
        return 1, f"{words[0]}: {error}\n".encode()


def _echo(words: list[str]) -> bytes:
    return (" ".join(words) + "\n").encode()


def _cat(sandbox: ScriptedSandbox, paths: list[str], cwd: str) -> bytes:
    output = b""
    for path in paths:
        full = sandbox.resolve(path, cwd)
        if full not in sandbox.files:
            raise FileNotFoundError(f"{path}: No such file or directory")
        output += sandbox.files[full]
    return output
