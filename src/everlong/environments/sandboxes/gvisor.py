"""Sandboxes with a kernel of their own: gVisor's `runsc`, files and processes in one snapshot.

A sandbox is a Linux kernel in user space (the sentry) that answers every system call of what runs in it, behind a seccomp filter;
the host's programs are mounted read-only, every change stays in the sentry's memory, and there is no network. Commands run under
the same launcher as elsewhere, inside, as an ordinary user. A checkpoint holds memory, processes and files together: a
snapshot can be restored under several names, and a sandbox paused to disk has neither process nor memory.

Differs from `local`: processes may outlive their command (`Command.keep_processes`); files lie in memory, so the disk limit is
at most the memory limit; a control group, where we may make one, holds the sandbox as a whole to twice its memory limit and
256 MB, and beyond it the sandbox dies. Needs Linux on x86-64 or arm64, `runsc`, util-linux, and root or user namespaces.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import posixpath
import shutil
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everlong.contracts.errors import SandboxError, WorkspaceTooLarge
from everlong.contracts.ports import Capabilities, Command, ExecResult, PauseTo, SandboxSpec, Snapshot
from everlong.contracts.records import Limits
from everlong.environments.sandboxes import guest_files
from everlong.environments.sandboxes.bundle import ASK, TOOLS, first_process, lay_out_etc, lay_out_root, write_bundle
from everlong.environments.sandboxes.folders import Territory
from everlong.environments.sandboxes.images import Image, ImageStore, stored_bytes
from everlong.environments.sandboxes.keeper import Keeper, Runsc
from everlong.environments.sandboxes.launcher import INNER_ID
from everlong.environments.sandboxes.launching import Launch, Request, compile_program
from everlong.environments.sandboxes.layout import (
    check_names,
    check_spec,
    folder_name,
    place_mounts,
    private_folders,
    room_of,
    unknown_snapshot,
)
from everlong.environments.sandboxes.local import BASE_ENV
from everlong.environments.sandboxes.memory_group import remove_group
from everlong.environments.sandboxes.registry import Claim, sweep
from everlong.environments.sandboxes.stacking import Layer, LayerStore
from everlong.environments.sandboxes.syscalls import REFUSED, UNCOUNTED, refusal
from everlong.environments.sandboxes.trees import TreeSize, check_room, remove_tree

_PYTHON = "/usr/bin/python3"
_AGENT = f"-user={INNER_ID}:{INNER_ID}"
_OWN_MB = 256
"""What the sentry and its helpers may need beside what runs in the sandbox."""
_PROBE_S = 30.0
_MEASURE_S = 300.0
_MAX_PATH = 4000
"""Bytes of a path in a workdir that is to be copied: what unpacks the copy opens each by its whole path."""
_TAR_CHANGED = 1
"""Exit code of tar where a file changed while it was read, or was gone: processes that a command left may do that."""
_AT_ONCE = 4
"""Sandboxes that start or are restored at the same time: more only wait for each other."""


def find_runsc(named: Path | None = None) -> Path:
    """The program: as named, else RUNSC, else where `make gvisor` puts it, else on the PATH. Raises SandboxError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "everlong" / "gvisor" / "runsc"
    on_path = shutil.which("runsc")
    places = [named or os.environ.get("RUNSC"), cache, on_path] if named is None else [named]
    for place in places:
        if place and os.access(place, os.X_OK):
            return Path(place).absolute()
    raise SandboxError(
        f"sandbox.type gvisor needs the program runsc, looked for at {', '.join(str(place) for place in places if place)}: "
        "`make gvisor` fetches it, or name one with sandbox.runsc or RUNSC="
    )


@dataclass(frozen=True, slots=True)
class Kept:
    """The content of a snapshot."""

    spec: SandboxSpec
    base: Layer
    image: Image


@dataclass(frozen=True, slots=True)
class Ground:
    """What every sandbox of a backend stands on."""

    keeper: Keeper
    launcher: str
    files: str
    """Programs as the sandbox sees them."""
    etc: Path
    tools: Path
    memory_groups: Path | None


class GvisorSandbox:
    """See the module. Made by `GvisorBackend`."""

    def __init__(self, backend: GvisorBackend, ground: Ground, spec: SandboxSpec, base: Layer) -> None:
        self._backend, self._ground, self._spec = backend, ground, spec
        self._base = base
        backend.layers.hold((base,))
        self._home = backend.claim.folder / folder_name(spec.name)
        groups = ground.memory_groups
        self._group = groups / f"everlong-{self._home.parent.name}-{self._home.name}" if groups else None
        self._id = ""
        """Of the container that runs now; empty where none does."""
        self._image: Image | None = None
        """What it is, while paused to disk."""
        self._paused = self._frozen = False
        """Frozen: by runsc, not by the launcher of a command."""
        self._lock, self._files = asyncio.Lock(), asyncio.Lock()
        self._launch: Launch | None = None
        self._closed = ""
        self._closing: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def name(self) -> str:
        return self._spec.name

    async def start(self, image: Path | None) -> None:
        """Fresh, or from a checkpoint, then its ttl begins; after a failure nothing is left."""
        try:
            self._home.mkdir()
            if self._group is not None:
                self._backend.claim.make_group(self._group, (2 * self._spec.limits.memory_mb + _OWN_MB) << 20)
            root, mounts = self._base.path / "root", self._backend.mounts[self._base]
            write_bundle(
                self._home / "bundle",
                root,
                mounts,
                self._ground.etc,
                self._ground.tools,
                first_process(self._ground.launcher),
            )
            await self._run(image)
            if image is None and os.geteuid() != 0:
                # An ordinary user cannot give files away on the host; in here everybody can be made.
                own = private_folders(self._spec)
                await self._ground.keeper.call("exec", self._id, "chown", "-hR", f"{INNER_ID}:{INNER_ID}", *own)
        except BaseException as error:
            await self.close()
            if isinstance(error, OSError):
                raise SandboxError(f"cannot start sandbox {self.name}: {error}") from error
            raise
        if (ttl_s := self._spec.ttl_s) is not None and self._closing is None:
            reason = f"its ttl of {ttl_s:g} s is over"
            self._expiry = asyncio.get_running_loop().call_later(ttl_s, self._begin_close, reason)

    async def exec(self, command: Command) -> ExecResult:
        if not command.argv or not (0 < command.timeout_s < math.inf):
            raise ValueError(f"a command needs an argv and a finite timeout_s > 0, got {command}")
        async with self._lock:
            self._check_open()
            words = ("sh", "-c", ASK) if command.keep_processes else (_PYTHON, "-I", "-S", self._ground.launcher)
            argv = self._ground.keeper.argv("exec", self._id, *words)
            self._launch = Launch(argv, Path("/"), self._request(command), command.timeout_s)
            try:
                result = await self._launch.run()
            finally:
                self._launch = None
            if result is None:
                self._check_open()
                raise SandboxError(f"the command in sandbox {self.name} was stopped")
            return result

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        return await self._file("read", path, max_bytes, None)

    async def write(self, path: str, data: bytes) -> None:
        await self._file("write", path, 0, data)

    async def fork(self, spec: SandboxSpec) -> GvisorSandbox:
        """The workdir goes from one to the other as a stream of tar, which nothing on the host unpacks."""
        if spec.files is not None:
            raise ValueError(f"a fork starts from its parent's workdir: spec.files must be None, got {spec.files!r}")
        async with self._lock, self._files:
            self._check_open()
            copy = await self._backend.create(spec, await self._measure())
            try:
                await self._pour_into(copy)
            except BaseException:
                await copy.close()
                raise
            return copy

    async def pause(self, to: PauseTo = "stopped") -> None:
        """To disk: at the end of the running command."""
        if to == "stopped" and self._launch is not None:
            self._check_open()
            self._launch.pause()
            self._paused = True
            return
        async with self._lock, self._files:
            if self._image is not None or (self._paused and to == "stopped"):
                return
            if self._paused:
                await self._wake()
            self._check_open()
            if to == "stopped":
                await self._ground.keeper.call("pause", self._id)
                self._frozen = True
            else:
                await self._swap_out()
            self._paused = True

    async def resume(self) -> None:
        if self._launch is not None:
            self._launch.resume()
            self._paused = False
            return
        async with self._lock, self._files:
            if self._paused:
                await self._wake()
                self._check_open()

    async def snapshot(self, parent: Snapshot | None = None) -> Snapshot:
        before = self._backend.kept(parent) if parent is not None else None
        async with self._lock, self._files:
            self._check_open()
            image = await self._checkpoint("-leave-running")
        return await self._backend.keep(self._spec, self._base, image, before, parent)

    async def rollback(self, snapshot: Snapshot) -> None:
        kept = self._backend.kept(snapshot)
        async with self._lock, self._files:
            self._check_open()
            if kept.base is not self._base:
                raise ValueError(
                    f"snapshot {snapshot.id} is of another sandbox than {self.name}: restore it under a name"
                )
            await self._stop()
            async with self._backend.whole(kept.image) as folder:
                await self._run(folder)

    async def close(self) -> None:
        self._begin_close("close was called")
        assert self._closing is not None
        await asyncio.shield(self._closing)

    async def _run(self, image: Path | None) -> None:
        self._id = self._backend.next_id()
        words = ("-detach", f"-bundle={self._home / 'bundle'}")
        async with self._backend.starting:
            if image is None:
                await self._ground.keeper.call("run", *words, self._id, group=self._group)
            else:
                await self._ground.keeper.call("restore", *words, f"-image-path={image}", self._id, group=self._group)

    async def _stop(self) -> None:
        if self._id:
            await self._ground.keeper.call("delete", "-force", self._id)
            self._id = ""

    async def _checkpoint(self, *flags: str) -> Image:
        image = self._backend.images.begin()
        try:
            await self._ground.keeper.call(
                "checkpoint", f"-image-path={image.folder}", "-compression=none", *flags, self._id
            )
        except BaseException:
            self._backend.images.let_go(image)
            raise
        return image

    async def _swap_out(self) -> None:
        self._image = await self._checkpoint()
        await self._stop()

    async def _wake(self) -> None:
        if self._frozen:
            await self._ground.keeper.call("resume", self._id)
            self._frozen = False
        elif self._image is not None:
            async with self._backend.whole(self._image) as folder:
                await self._run(folder)
            self._backend.images.let_go(self._image)
            self._image = None
        self._paused = False

    async def _file(self, op: str, path: str, max_bytes: int, data: bytes | None) -> bytes:
        async with self._files:
            self._check_open()
            full = posixpath.join(self._spec.workdir, path)
            words = (_PYTHON, "-I", "-S", self._ground.files, op, full, str(max_bytes), *private_folders(self._spec))
            argv = self._ground.keeper.argv("exec", _AGENT, self._id, *words)
            code, output = await self._ground.keeper.run(argv, data)
        if code == guest_files.ABSENT:
            raise FileNotFoundError(2, "no such regular file in the sandbox", full)
        if code == guest_files.OUTSIDE:
            raise SandboxError(output.decode(errors="replace"))
        if code:
            raise SandboxError(f"cannot {op} {path} in sandbox {self.name}: {output.decode(errors='replace')[-300:]}")
        return output

    async def _measure(self) -> TreeSize:
        """What is in the workdir. Raises WorkspaceTooLarge where that is more than can be copied."""
        words = ("exec", self._id, _PYTHON, "-I", "-S", self._ground.launcher, self._spec.workdir)
        size_bytes, entries, longest = map(int, (await self._ground.keeper.call(*words, timeout_s=_MEASURE_S)).split())
        size = TreeSize(entries, size_bytes)
        check_room(size, self._room())
        if longest > _MAX_PATH:
            raise WorkspaceTooLarge(
                f"the workdir may hold paths of {_MAX_PATH} bytes to be copied, and holds one of {longest}: remove it"
            )
        return size

    def _room(self) -> TreeSize:
        return room_of(self._backend.start_sizes[self._base], self._disk_limits())

    def _disk_limits(self) -> Limits:
        """Files lie in memory."""
        limits = self._spec.limits
        return msgspec.structs.replace(limits, disk_mb=min(limits.disk_mb, limits.memory_mb))

    async def _pour_into(self, other: GvisorSandbox) -> None:
        keeper = self._ground.keeper
        pack = keeper.argv("exec", self._id, "tar", "-C", self._spec.workdir, "--numeric-owner", "-cf", "-", ".")
        unpack = keeper.argv("exec", other._id, "tar", "-C", other._spec.workdir, "--numeric-owner", "-xpf", "-")
        reader, writer = os.pipe()
        try:
            source = await asyncio.create_subprocess_exec(*pack, stdin=asyncio.subprocess.DEVNULL, stdout=writer)
            target = await asyncio.create_subprocess_exec(*unpack, stdin=reader, stdout=asyncio.subprocess.DEVNULL)
        finally:
            os.close(reader)
            os.close(writer)
        codes = await asyncio.gather(source.wait(), target.wait())
        if codes[0] not in (0, _TAR_CHANGED) or codes[1]:
            raise SandboxError(f"the workdir of sandbox {self.name} could not be copied: tar ended with {codes}")

    def _begin_close(self, reason: str) -> None:
        if self._closing is None:
            self._closed = reason
            if self._expiry is not None:
                self._expiry.cancel()
            if self._launch is not None:
                self._launch.stop()
            self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        async with self._lock, self._files:
            try:
                await self._stop()
                await asyncio.to_thread(self._remove)
            finally:
                self._backend.forget(self)

    def _remove(self) -> None:
        remove_tree(self._home)
        if self._image is not None:
            self._backend.images.let_go(self._image)
        self._backend.layers.let_go((self._base,))
        if self._group is not None:
            remove_group(str(self._group))

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError(f"sandbox {self.name} is closed: {self._closed}")
        if self._paused:
            raise SandboxError(f"sandbox {self.name} is paused: resume it first")

    def _request(self, command: Command) -> Request:
        spec, limits = self._spec, self._disk_limits()
        cwd = posixpath.join(spec.workdir, command.cwd or "")
        return {
            "isolation": "guest",
            "keep_processes": command.keep_processes,
            "seen_root": "",
            "folders": list(private_folders(spec)),
            "argv": list(command.argv),
            "env": {**BASE_ENV, "HOME": spec.workdir, **spec.env, **command.env},
            "cwd": cwd,
            "shown_cwd": cwd,
            "timeout_s": command.timeout_s,
            "output_bytes": limits.output_bytes,
            "memory_bytes": limits.memory_mb << 20,
            "disk_bytes": limits.disk_mb << 20,
            "names": self._room().entries,
            "processes": limits.processes,
            "memory_group": "",
            "filter": refusal(os.uname().machine, REFUSED + UNCOUNTED),
        }


class GvisorBackend:
    """Sandboxes below `root`; removes what dead managers left there. `runsc`: None finds one."""

    def __init__(self, root: Path, *, runsc: Path | None = None) -> None:
        root = root.absolute()
        self._program = find_runsc(runsc)
        self.claim = Claim(root)
        self.swept = sweep(root)
        """Folders of dead managers that were removed at the start."""
        self._root = root
        self.layers = LayerStore(self.claim.folder / "bases")
        self.images = ImageStore(self.claim.folder / "images")
        self.starting = asyncio.Semaphore(_AT_ONCE)
        self._storing = asyncio.Lock()
        self._kept: dict[str, Kept] = {}
        self.mounts: dict[Layer, list[tuple[str, str]]] = {}
        """What is mounted where in the sandboxes of a base."""
        self.start_sizes: dict[Layer, TreeSize] = {}
        """Of the workdirs that the sandboxes of a base were made with."""
        self._sandboxes: dict[str, GvisorSandbox] = {}
        self._ids, self._snapshot_ids = itertools.count(), itertools.count()
        self._probing = asyncio.Lock()
        self._ground: Ground | None = None
        self._found: Capabilities | None = None

    @property
    def scratch(self) -> Path:
        return self.claim.folder

    async def probe(self) -> Capabilities:
        """Run a command, and restore a snapshot of its sandbox, once. Raises SandboxError where that does not work."""
        async with self._probing:
            if self._found is None:
                await self._lay_ground()
                self._found = await self._try()
            return self._found

    async def create(self, spec: SandboxSpec, start_size: TreeSize | None = None) -> GvisorSandbox:
        """`start_size`: of what will be put into its workdir; None is the size of its files."""
        check_spec(spec)
        if spec.network:
            raise SandboxError(
                f"sandbox {spec.name} asks for a network, and gVisor sandboxes have none: run the task with sandbox.type local"
            )
        await self.probe()
        return await self._create(spec, start_size)

    async def restore(self, snapshot: Snapshot, names: tuple[str, ...]) -> list[GvisorSandbox]:
        kept = self.kept(snapshot)
        check_names(names, self._sandboxes)
        restored = [self._add(msgspec.structs.replace(kept.spec, name=name), kept.base) for name in names]
        async with self.whole(kept.image) as folder:
            ends = await asyncio.gather(*(sandbox.start(folder) for sandbox in restored), return_exceptions=True)
        failed = [end for end in ends if isinstance(end, BaseException)]
        if failed:
            await asyncio.gather(*(sandbox.close() for sandbox in restored))
            raise failed[0]
        return restored

    async def drop(self, snapshot: Snapshot) -> None:
        kept = self._kept.pop(snapshot.id, None)
        if kept is not None:
            async with self._storing:
                await asyncio.to_thread(self.images.let_go, kept.image)
                self.layers.let_go((kept.base,))

    async def keep(
        self, spec: SandboxSpec, base: Layer, image: Image, before: Kept | None, parent: Snapshot | None
    ) -> Snapshot:
        """A sandbox says what it was."""
        self.layers.hold((base,))
        if before is not None:
            async with self._storing:
                await asyncio.to_thread(self.images.shrink, image, before.image)
        snapshot = Snapshot(
            id=str(next(self._snapshot_ids)),
            sandbox=spec.name,
            parent=parent.id if parent is not None else None,
            stored_bytes=stored_bytes(image.folder),
        )
        self._kept[snapshot.id] = Kept(spec, base, image)
        return snapshot

    def kept(self, snapshot: Snapshot) -> Kept:
        if snapshot.id not in self._kept:
            raise unknown_snapshot(snapshot)
        return self._kept[snapshot.id]

    @contextlib.asynccontextmanager
    async def whole(self, image: Image) -> AsyncGenerator[Path]:
        """The checkpoint as runsc reads it."""
        with contextlib.ExitStack() as stack:
            async with self._storing:
                folder: Path = await asyncio.to_thread(lambda: stack.enter_context(self.images.whole(image)))
            yield folder

    def next_id(self) -> str:
        return f"s{next(self._ids)}"

    def forget(self, sandbox: GvisorSandbox) -> None:
        """A sandbox says that it is closed; its name is free again."""
        self._sandboxes.pop(sandbox.name, None)

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._sandboxes.values())))
        if self._ground is not None:
            await self._ground.keeper.close()
        await asyncio.to_thread(self.claim.release)
        await asyncio.to_thread(sweep, self._root)

    async def _create(self, spec: SandboxSpec, start_size: TreeSize | None = None) -> GvisorSandbox:
        if spec.name in self._sandboxes:
            raise SandboxError(f"a sandbox named {spec.name!r} is open already: names are unique within a backend")
        base = self.layers.new()
        sandbox = self._add(spec, base)
        try:
            filled = await asyncio.to_thread(self._fill, base, spec)
            self.start_sizes[base] = start_size or filled
        except BaseException as error:
            await sandbox.close()
            if isinstance(error, OSError):
                raise SandboxError(f"cannot lay out sandbox {spec.name}: {error}") from error
            raise
        await sandbox.start(None)
        return sandbox

    def _add(self, spec: SandboxSpec, base: Layer) -> GvisorSandbox:
        assert self._ground is not None
        sandbox = self._sandboxes[spec.name] = GvisorSandbox(self, self._ground, spec, base)
        return sandbox

    def _fill(self, base: Layer, spec: SandboxSpec) -> TreeSize:
        root = base.path / "root"
        size = lay_out_root(root, spec, Path(spec.files).resolve() if spec.files is not None else None)
        owner = INNER_ID if os.geteuid() == 0 else None
        territory = Territory(root=root, folders=private_folders(spec), workdir=spec.workdir, owner=owner)
        self.mounts[base] = place_mounts(base.path, territory, spec.mounts, caged=True)
        return size

    async def _lay_ground(self) -> None:
        if self._ground is not None:
            return
        tools, etc, state = (self.claim.folder / name for name in ("tools", "etc", "state"))
        for folder in (tools, state):
            folder.mkdir()
        tools.chmod(0o755)
        launcher = await compile_program(_PYTHON, tools)
        files = await compile_program(_PYTHON, tools, Path(guest_files.__file__))
        await asyncio.to_thread(lay_out_etc, etc)
        keeper = Keeper(Runsc(self._program, state))
        await keeper.start()
        self._ground = Ground(
            keeper=keeper,
            launcher=f"{TOOLS}/{launcher.name}",
            files=f"{TOOLS}/{files.name}",
            etc=etc,
            tools=tools,
            memory_groups=await asyncio.to_thread(self.claim.usable_groups) if os.geteuid() == 0 else None,
        )

    async def _try(self) -> Capabilities:
        assert self._ground is not None
        sandbox = await self._create(SandboxSpec(name="probe"))
        try:
            first = await sandbox.exec(Command(argv=("sh", "-c", "echo kept > file; id -u"), timeout_s=_PROBE_S))
            if first.output != f"{INNER_ID}\n".encode():
                raise SandboxError(
                    f"the first command in a gVisor sandbox said {first.output!r}, not the id of its user"
                )
            snapshot = await sandbox.snapshot()
            await sandbox.rollback(snapshot)
            await self.drop(snapshot)
            if await sandbox.read("file") != b"kept\n":
                raise SandboxError("a gVisor sandbox restored from its snapshot did not hold its file")
        finally:
            await sandbox.close()
        group = (
            "a control group holds each sandbox to twice its memory limit and 256 MB; "
            if self._ground.memory_groups
            else ""
        )
        return Capabilities(
            isolation="user-kernel",
            network_off=True,
            memory_limit=True,
            process_limit=True,
            snapshots="images",
            processes=True,
            pause_to_disk=True,
            incremental=True,
            reason=f"{group}memory, processes and disk are sampled every 100 ms inside; files lie in memory; no network",
        )
