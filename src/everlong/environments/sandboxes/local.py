"""Sandboxes on this machine: files in a folder of the host, one launcher process per command, nothing in between.

With isolation "namespaces" a command sees the host's programs read-only, its own workdir, /tmp and writable folders, its mounts
read-only, and no network but lo; the rest of the host is not there. It runs as an ordinary user without capabilities. With
isolation "none" it runs in a copy of the files, with everything that the user who runs everlong may do; paths below the workdir
are those of the copy (its root is in `EVERLONG_ROOT`), and only whole paths in `cwd`, `argv` and `env` are translated.

Limits: time exactly; output is read on and thrown away beyond its limit; processes by RLIMIT_NPROC in a user namespace of the
command's own (sampled without namespaces); memory by a control group where we may make one, else sampled every 100 ms, so that
a command can exceed it by what it fills in that time; disk by RLIMIT_FSIZE for one file and by counting once per second and at
the end: a command that grew beyond it ends with 137 and a line that says so, and later ones may still remove files.
/dev/shm holds 64 MB beside the memory limit. One command runs at a time per sandbox.

Snapshots are of files, since nothing lives between two commands. In namespaces the first one seals the folders as a layer, and
commands see an overlay of what they write and the layers below: snapshot, restore and rollback cost the same whatever the size.
Where overlays cannot be mounted, and without namespaces, they copy. While a command runs a write from outside waits for its end
once there are layers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import math
import os
import posixpath
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from everlong.contracts.errors import SandboxError
from everlong.contracts.ports import Capabilities, Command, ExecResult, PauseTo, SandboxSpec, Snapshot
from everlong.contracts.records import Limits
from everlong.environments.sandboxes.folders import Territory, is_below
from everlong.environments.sandboxes.launching import Launch, Request, compile_program, python_candidates
from everlong.environments.sandboxes.layers import MAX_LAYERS
from everlong.environments.sandboxes.layout import (
    TMP,
    check_names,
    check_spec,
    fill_folders,
    folder_name,
    make_home,
    place_mounts,
    private_folders,
    room_of,
    unknown_snapshot,
)
from everlong.environments.sandboxes.memory_group import remove_group
from everlong.environments.sandboxes.registry import MARKER, Claim, kill_marked, sweep
from everlong.environments.sandboxes.stacking import LayerStore, Source, Stack, alone_in, empty_like
from everlong.environments.sandboxes.syscalls import MACHINES, REFUSED, UNCOUNTED, refusal
from everlong.environments.sandboxes.trees import TreeSize, copy_tree, remove_tree

AGENT_ID = 65534
"""User and group that commands run as when we are root: the agent must never be root of the host."""
BASE_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", "TZ": "UTC"}
_PROBE_S = 20.0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """A way to run commands on this machine."""

    python: str
    launcher: Path
    """Compiled for `python`."""
    isolation: Literal["namespaces", "none"]
    memory_groups: Path | None
    """Where a group per sandbox is made; None samples memory instead."""
    overlays: bool = False
    """Whether layers can be mounted on each other."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The content of a snapshot."""

    spec: SandboxSpec
    stack: Stack
    start_size: TreeSize
    """Of the workdir that its sandbox was made with."""


class LocalSandbox:
    """See the module. Made by `LocalBackend.create` and `fork`."""

    def __init__(self, backend: LocalBackend, spec: SandboxSpec, home: Path, place: Place) -> None:
        self._backend, self._spec, self._home, self._place = backend, spec, home, place
        self._caged = place.isolation == "namespaces"
        self._memory_group = (
            place.memory_groups / f"everlong-{home.parent.name}-{home.name}" if place.memory_groups else None
        )
        self._territory = Territory(
            root=home / "root",
            folders=private_folders(spec),
            workdir=spec.workdir,
            owner=agent_owner() if self._caged else None,
        )
        self._has_group = False
        self._mounts: list[tuple[str, str]] = []
        self._stack: Stack = ()
        """Below what is written now; empty until a snapshot seals something."""
        self._lock = asyncio.Lock()
        self._launch: Launch | None = None
        self._paused = False
        self._closed = ""
        self._closing: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._start_size = TreeSize()

    @property
    def name(self) -> str:
        return self._spec.name

    async def exec(self, command: Command) -> ExecResult:
        if not command.argv or not (0 < command.timeout_s < math.inf):
            raise ValueError(f"a command needs an argv and a finite timeout_s > 0, got {command}")
        if command.keep_processes:
            raise ValueError(
                "a local sandbox kills what a command leaves: leave keep_processes out, or run with sandbox.type gvisor"
            )
        async with self._lock:
            self._check_open()
            with self._storing("a memory group"):
                self._make_group()
            launcher = self._place.launcher
            argv = (self._place.python, "-I", "-S", launcher.name)
            self._launch = Launch(argv, launcher.parent, self._request(command), command.timeout_s)
            try:
                result = await self._launch.run()
            finally:
                self._launch = None
            if result is None:
                self._check_open()
                raise SandboxError(f"the command in sandbox {self.name} was stopped")
            return result

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Up to `max_bytes` of a regular file in the workdir, /tmp or a writable folder; links are followed inside these."""
        self._check_open()
        try:
            return await asyncio.to_thread(self._territory.read, path, max_bytes)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise SandboxError(f"cannot read {path} in sandbox {self.name}: {error}") from error

    async def write(self, path: str, data: bytes) -> None:
        self._check_open()
        # A layer that is mounted must not be changed beside the mount.
        async with self._lock if self._stack else contextlib.nullcontext():
            self._check_open()
            await self._write(path, data)

    async def _write(self, path: str, data: bytes) -> None:
        try:
            await asyncio.to_thread(self._territory.write, path, data)
        except OSError as error:
            raise SandboxError(f"cannot write {path} in sandbox {self.name}: {error}") from error

    async def fork(self, spec: SandboxSpec) -> LocalSandbox:
        if spec.files is not None:
            raise ValueError(f"a fork starts from its parent's workdir: spec.files must be None, got {spec.files!r}")
        async with self._lock:
            self._check_open()
            return await self._backend.open(spec, self._left())

    def _left(self) -> Source:
        """What commands left in the workdir; nothing where they removed it, or put something else in its place."""
        workdir = self._spec.workdir.lstrip("/")
        folders = tuple(root / workdir for root in (self._territory.root, *self._territory.lowers))
        is_there = os.path.isdir(folders[0]) and not os.path.islink(folders[0])
        return Source(folders if is_there else (), self._stack, self._room())

    def _room(self) -> TreeSize:
        return room_of(self._start_size, self._spec.limits)

    async def pause(self, to: PauseTo = "stopped") -> None:
        if to == "disk":
            raise ValueError(
                'a local sandbox pauses to "stopped" only: it cannot put the memory of processes on disk (sandbox.type gvisor '
                "can), and between two commands it has none"
            )
        if not self._paused:
            self._check_open()
            self._paused = True
            if self._launch is not None:
                self._launch.pause()

    async def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._check_open()
            if self._launch is not None:
                self._launch.resume()

    async def snapshot(self, parent: Snapshot | None = None) -> Snapshot:
        """Everything that did not change is shared with earlier ones, whether `parent` names one or not."""
        if parent is not None:
            self._backend.kept(parent)
        async with self._lock:
            self._check_open()
            with self._storing("snapshot"):
                # Sealing a layer takes less time than asking a thread to.
                cheap = self._place.overlays and len(self._stack) < MAX_LAYERS
                stack = self._freeze() if cheap else await asyncio.to_thread(self._freeze)
            return self._backend.keep(Kept(self._spec, stack, self._start_size), parent)

    async def rollback(self, snapshot: Snapshot) -> None:
        kept = self._backend.kept(snapshot)
        async with self._lock:
            self._check_open()
            if private_folders(kept.spec) != self._territory.folders:
                raise ValueError(f"snapshot {snapshot.id} has other folders than sandbox {self.name}")
            with self._storing("rollback"):
                await asyncio.to_thread(self._become, kept)

    async def start_from(self, kept: Kept) -> None:
        """As `start`, with what a snapshot holds."""
        # An empty layer above others is made in less time than a thread is found.
        cheap = self._place.overlays and not self._spec.mounts
        await self._start(lambda: self._lay_on(kept), in_thread=not cheap)

    def _lay_on(self, kept: Kept) -> None:
        make_home(self._home)
        self._become(kept)
        self._mounts = place_mounts(self._home, self._territory, self._spec.mounts, caged=self._caged)

    def _freeze(self) -> Stack:
        """What it is now as layers that nobody changes; with overlays it goes on above them."""
        layers, root = self._backend.layers, self._territory.root
        if not self._place.overlays:
            return (layers.copy(root, (), self._room()),)
        if len(self._stack) < MAX_LAYERS:
            stack = (layers.seal(root), *self._stack)
        else:
            stack = (layers.copy(root, self._stack, self._room()),)
            remove_tree(root)
        self._stand_on(stack)
        return stack

    def _become(self, kept: Kept) -> None:
        root, stack = self._territory.root, kept.stack
        remove_tree(root)
        if self._place.overlays:
            self._stand_on(stack)
        else:
            root.mkdir()
            with alone_in(stack):
                copy_tree(stack[0].path, root, None, keep_owners=True)
        self._start_size = kept.start_size

    def _stand_on(self, stack: Stack) -> None:
        """An empty upper layer above this stack."""
        layers = self._backend.layers
        before, self._stack = self._stack, layers.hold(stack)
        empty_like(stack[0].path, self._territory.root, self._territory.folders)
        self._territory = replace(self._territory, lowers=tuple(layer.path for layer in stack))
        layers.let_go(before)

    @contextlib.contextmanager
    def _storing(self, what: str) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise SandboxError(f"{what} of sandbox {self.name} failed: {error}") from error

    async def close(self) -> None:
        self._begin_close("close was called")
        assert self._closing is not None
        await asyncio.shield(self._closing)

    async def start(self, source: Source) -> None:
        """Make what it needs on the host, then let its ttl begin; after a failure nothing is left."""
        await self._start(lambda: self._lay_out(source), in_thread=True)

    async def _start(self, lay_out: Callable[[], None], *, in_thread: bool) -> None:
        try:
            if in_thread:
                await asyncio.to_thread(lay_out)
            else:
                lay_out()
        except BaseException as error:
            await self.close()
            if isinstance(error, OSError):
                raise SandboxError(f"cannot lay out sandbox {self.name}: {error}") from error
            raise
        if (ttl_s := self._spec.ttl_s) is not None and self._closing is None:
            reason = f"its ttl of {ttl_s:g} s is over"
            self._expiry = asyncio.get_running_loop().call_later(ttl_s, self._begin_close, reason)

    def _lay_out(self, source: Source) -> None:
        make_home(self._home)
        with alone_in(source.stack):
            self._start_size = fill_folders(self._territory, self._spec.workdir, source.folders, source.room)
        self._mounts = place_mounts(self._home, self._territory, self._spec.mounts, caged=self._caged)

    def _make_group(self) -> None:
        """With the first command: most of what a start costs."""
        if self._memory_group is not None and not self._has_group:
            self._backend.claim.make_group(self._memory_group, self._spec.limits.memory_mb << 20)
            self._has_group = True

    def _begin_close(self, reason: str) -> None:
        if self._closing is None:
            self._closed = reason
            if self._expiry is not None:
                self._expiry.cancel()
            if self._launch is not None:
                self._launch.stop()
            self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        async with self._lock:
            try:
                await asyncio.to_thread(self._remove)
            finally:
                self._backend.forget(self)

    def _remove(self) -> None:
        if not self._caged:
            kill_marked(f"{self._home}/")
        remove_tree(self._home)
        self._backend.layers.let_go(self._stack)
        self._stack = ()
        if self._memory_group is not None:
            remove_group(str(self._memory_group))

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError(f"sandbox {self.name} is closed: {self._closed}")
        if self._paused:
            raise SandboxError(f"sandbox {self.name} is paused: resume it first")

    def _request(self, command: Command) -> Request:
        spec, limits = self._spec, self._spec.limits
        cwd = posixpath.join(spec.workdir, command.cwd or "")
        env = {**BASE_ENV, "HOME": spec.workdir, **spec.env, **command.env}
        if not self._caged:
            env = {key: self._seen(value) for key, value in {"TMPDIR": TMP, **env}.items()}
            env |= {"EVERLONG_ROOT": str(self._territory.root), MARKER: f"{self._home}/"}
        return {
            "isolation": self._place.isolation,
            "parent": os.getpid(),
            "root": str(self._territory.root),
            "seen_root": "" if self._caged else str(self._territory.root),
            "mountpoint": str(self._home / "mountpoint"),
            "folders": list(self._territory.folders),
            "mounts": self._mounts,
            "network": spec.network,
            "outer_id": self._territory.owner or 0,
            "argv": list(command.argv) if self._caged else [self._seen(word) for word in command.argv],
            "env": env,
            "cwd": cwd if self._caged else self._seen(cwd),
            "shown_cwd": cwd,
            "timeout_s": command.timeout_s,
            "output_bytes": limits.output_bytes,
            "memory_bytes": limits.memory_mb << 20,
            "disk_bytes": limits.disk_mb << 20,
            "names": self._room().entries,
            "processes": limits.processes,
            "memory_group": str(self._memory_group or ""),
            "filter": refused_calls(counted=self._memory_group is not None) if self._caged else b"",
            "keep_processes": False,
            "layers": str(self._backend.layers.layers_folder),
            "lowers": [layer.path.name for layer in self._stack],
            "overlay_work": str(self._home / "work"),
        }

    def _seen(self, word: str) -> str:
        """Without namespaces: where a path of the sandbox lies on the host."""
        own = (*self._territory.folders, *(mount.target for mount in self._spec.mounts))
        return str(self._territory.host(word)) if any(is_below(word, folder) for folder in own) else word


class LocalBackend:
    """Sandboxes below `root`; removes what dead managers left there, and touches nothing of living ones."""

    def __init__(
        self,
        root: Path,
        *,
        isolation: Literal["auto", "namespaces", "none"] = "auto",
        warn: Callable[[str], None] = _LOG.warning,
    ) -> None:
        root = root.absolute()
        self.claim = Claim(root)
        self.swept = sweep(root)
        """Folders of dead managers that were removed at the start."""
        self._root, self._isolation, self._warn = root, isolation, warn
        self.layers = LayerStore(self.claim.folder / "layers")
        self._kept: dict[str, Kept] = {}
        self._snapshot_ids = itertools.count()
        self._sandboxes: dict[str, LocalSandbox] = {}
        self._probing = asyncio.Lock()
        self._found: tuple[Place, Capabilities] | None = None

    @property
    def scratch(self) -> Path:
        return self.claim.folder

    async def probe(self) -> Capabilities:
        """Run a command once in every allowed way until one works. Raises SandboxError where none does."""
        return (await self._find())[1]

    async def create(self, spec: SandboxSpec) -> LocalSandbox:
        return await self.open(spec, Source((Path(spec.files).resolve(),)) if spec.files is not None else Source())

    async def restore(self, snapshot: Snapshot, names: tuple[str, ...]) -> list[LocalSandbox]:
        kept = self.kept(snapshot)
        check_names(names, self._sandboxes)
        place, _ = await self._find()
        restored: list[LocalSandbox] = []
        try:
            for name in names:
                spec = msgspec.structs.replace(kept.spec, name=name)
                sandbox = self._sandboxes[name] = LocalSandbox(self, spec, self._home(name), place)
                await sandbox.start_from(kept)
                restored.append(sandbox)
        except BaseException:
            await asyncio.gather(*(sandbox.close() for sandbox in restored))
            raise
        return restored

    async def drop(self, snapshot: Snapshot) -> None:
        kept = self._kept.pop(snapshot.id, None)
        if kept is not None:
            await asyncio.to_thread(self.layers.let_go, kept.stack)

    def keep(self, kept: Kept, parent: Snapshot | None) -> Snapshot:
        """A sandbox says what it was."""
        snapshot = Snapshot(
            id=str(next(self._snapshot_ids)), sandbox=kept.spec.name, parent=parent.id if parent is not None else None
        )
        self.layers.hold(kept.stack)
        self._kept[snapshot.id] = kept
        return snapshot

    def kept(self, snapshot: Snapshot) -> Kept:
        if snapshot.id not in self._kept:
            raise unknown_snapshot(snapshot)
        return self._kept[snapshot.id]

    def _home(self, name: str) -> Path:
        return self.claim.folder / folder_name(name)

    async def open(self, spec: SandboxSpec, source: Source) -> LocalSandbox:
        """A sandbox whose workdir holds a copy of `source`. Raises WorkspaceTooLarge where that is beyond its room."""
        check_spec(spec)
        place, _ = await self._find()
        if spec.name in self._sandboxes:
            raise SandboxError(f"a sandbox named {spec.name!r} is open already: names are unique within a backend")
        sandbox = LocalSandbox(self, spec, self._home(spec.name), place)
        self._sandboxes[spec.name] = sandbox
        await sandbox.start(source)
        return sandbox

    def forget(self, sandbox: LocalSandbox) -> None:
        """A sandbox says that it is closed; its name is free again."""
        self._sandboxes.pop(sandbox.name, None)

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._sandboxes.values())))
        await asyncio.to_thread(self.claim.release)
        await asyncio.to_thread(sweep, self._root)

    async def _find(self) -> tuple[Place, Capabilities]:
        async with self._probing:
            if self._found is None:
                self._found = await self._try_places()
                capabilities = self._found[1]
                if self._isolation == "auto" and capabilities.isolation == "none":
                    self._warn(f"commands of sandboxes are NOT isolated from this machine: {capabilities.reason}")
            return self._found

    async def _try_places(self) -> tuple[Place, Capabilities]:
        failures: list[str] = []
        for isolation in ("namespaces", "none") if self._isolation == "auto" else (self._isolation,):
            grouped = isolation == "namespaces" and os.geteuid() == 0
            groups = await asyncio.to_thread(self.claim.usable_groups) if grouped else None
            for python in python_candidates():
                try:
                    launcher = await compile_program(python, self.claim.folder)
                    place = Place(python, launcher, isolation, groups)
                    limited = await self._try(place)
                    place = replace(place, overlays=isolation == "namespaces" and await self._stacks(place))
                except SandboxError as error:
                    failures.append(f"{isolation} with {python}: {error}")
                else:
                    return place, describe(place, limited, failures)
        raise SandboxError(
            f"no sandbox can run here with isolation {self._isolation!r}: {'; '.join(failures)}. Namespaces need Linux >= 5.14 "
            "that lets this user make user namespaces, and a Python with ctypes"
        )

    async def _try(self, place: Place) -> bool:
        """Whether a second process is refused where one is allowed. Raises SandboxError where nothing can be started."""
        spec = SandboxSpec(name="probe", limits=Limits(memory_mb=256, processes=1))
        sandbox = LocalSandbox(self, spec, self.claim.folder / f"probe-{place.isolation}", place)
        await sandbox.start(Source())
        try:
            one_more = Command(argv=("sh", "-c", "/bin/true; exit 7"), timeout_s=_PROBE_S)
            return (await sandbox.exec(one_more)).exit_code != 7
        finally:
            await sandbox.close()

    async def _stacks(self, place: Place) -> bool:
        """Whether a command sees and changes what lies in a sealed layer."""
        sandbox = LocalSandbox(
            self, SandboxSpec(name="probe"), self.claim.folder / "probe-overlay", replace(place, overlays=True)
        )
        await sandbox.start(Source())
        try:
            await sandbox.write("below", b"x")
            await self.drop(await sandbox.snapshot())
            script = Command(argv=("sh", "-c", "test -s below && echo >> below"), timeout_s=_PROBE_S)
            return (await sandbox.exec(script)).exit_code == 0
        except SandboxError:
            return False
        finally:
            await sandbox.close()


def agent_owner() -> int | None:
    """`AGENT_ID` where we are root and may give files to it; None where commands run as our own user."""
    if os.geteuid() != 0:
        return None
    ranges = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return AGENT_ID if any(first <= AGENT_ID < first + count for first, _, count in ranges) else None


@functools.cache
def refused_calls(*, counted: bool) -> bytes:
    """The filter for this machine. `counted`: a control group holds the memory. Raises SandboxError."""
    machine = os.uname().machine
    if machine not in MACHINES:
        raise SandboxError(
            f"namespaces need a machine whose system calls are known ({', '.join(MACHINES)}), got {machine}"
        )
    return refusal(machine, REFUSED if counted else REFUSED + UNCOUNTED)


def describe(place: Place, process_limit: bool, failures: list[str]) -> Capabilities:
    caged = place.isolation == "namespaces"
    memory = "held by a control group" if place.memory_groups else "sampled every 100 ms"
    processes = "held by the kernel" if caged and process_limit else "sampled every 100 ms"
    notes = [*failures, f"memory is {memory}", f"processes are {processes}", "disk is counted once per second"]
    if caged and not place.overlays:
        notes.append("snapshots copy every file: overlays cannot be mounted here")
    if not caged:
        notes.insert(0, "without namespaces a command may do what this user may do, network included")
    return Capabilities(
        isolation=place.isolation,
        network_off=caged,
        memory_limit=True,
        process_limit=True,
        real_paths=caged,
        snapshots="layers" if place.overlays else "copies",
        incremental=place.overlays,
        reason="; ".join(notes),
    )
