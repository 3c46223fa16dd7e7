"""Trees of files that an agent made, copied and removed: any depth, any names, any permissions, no link followed.

A tree is walked with one folder open at a time, down by name and up by "..", since an agent makes in a second a chain of
folders that is longer than a path may be (PATH_MAX) and than files may be open. Nothing may move in a tree meanwhile; where
".." is not the folder that the walk came from, it stops. Where a tree lies in several layers, one folder per layer is open.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from everlong.contracts.errors import SandboxError, WorkspaceTooLarge
from everlong.environments.sandboxes.layers import is_opaque, is_whiteout

FICLONE = 0x40049409
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class TreeSize:
    entries: int = 0
    """Files, folders, links and whatever else has a name."""
    size_bytes: int = 0
    """On disk: holes count nothing, a file with several names counts once."""


def check_room(size: TreeSize, room: TreeSize | None) -> None:
    """Raises WorkspaceTooLarge beyond it; None is room for anything."""
    if room is not None and (size.entries > room.entries or size.size_bytes > room.size_bytes):
        raise WorkspaceTooLarge(
            f"the workdir may hold {room.entries} names and {room.size_bytes >> 20} MB to be copied, and holds more: "
            "remove what is not needed, or raise the task's storage_mb"
        )


@dataclass(slots=True)
class _Level:
    """A folder between the top and where a walk stands."""

    name: str
    statuses: list[os.stat_result | None]
    """Of it in every layer, top first; None where it or a folder above it takes no part. The first one is what shows."""
    folders: list[str]
    """Folders in it that are still to be walked."""

    @property
    def shown(self) -> os.stat_result:
        return next(status for status in self.statuses if status is not None)


def copy_tree(
    source: Path | tuple[Path, ...],
    target: Path,
    owner: int | None,
    room: TreeSize | None = None,
    *,
    keep_owners: bool = False,
) -> TreeSize:
    """Copy what is in `source` into the folder `target`: modes, times and links as they are; gives what was copied.

    `source`: a folder, or the same one in several layers, top first, of which what they show together is copied. Pipes, sockets
    and devices are left out, set-user-id bits dropped, holes and hard links kept, blocks shared where the file system can. What
    is copied belongs to `owner`, or with `keep_owners` to whom it belonged, which takes root. Raises OSError; WorkspaceTooLarge
    where the tree is larger than `room`.
    """
    sources = source if isinstance(source, tuple) else (source,)
    with tempfile.TemporaryDirectory(prefix=".links-", dir=target.parent) as links:
        copy = _Copy(target, owner, room, links, keep_owners=keep_owners and os.geteuid() == 0)
        try:
            copy.run(sources)
        finally:
            copy.close()
        return TreeSize(copy.entries, copy.size_bytes)


class _Copy:
    """The walk of one copy; it stands in a folder of the source and in the same one of the target."""

    def __init__(
        self, target: Path, owner: int | None, room: TreeSize | None, links: str, *, keep_owners: bool
    ) -> None:
        self._owner, self._room, self._links, self._keep_owners = owner, room, links, keep_owners
        self.entries = self.size_bytes = 0
        self._sources: list[int] = []
        """The folder in every layer; for a layer that takes no part in it, the last one above it that it took part in."""
        self._target = os.open(target, _FOLDER)
        self._levels = [_Level("", [], [])]

    def close(self) -> None:
        for fd in (*self._sources, self._target):
            os.close(fd)

    def run(self, sources: tuple[Path, ...]) -> None:
        for source in sources:
            status = os.stat(source, follow_symlinks=False)
            self._sources.append(_enter(os.fspath(source), None, status.st_mode))
            self._levels[-1].statuses.append(status)
        try:
            self._walk()
        except BaseException:
            self._lock_all()
            raise

    def _walk(self) -> None:
        self._levels[-1].folders = self._copy_entries()
        while True:
            level = self._levels[-1]
            if level.folders:
                self._go_down(level.folders.pop())
            elif len(self._levels) > 1:
                self._go_up()
            else:
                self._leave()
                return

    def _go_down(self, name: str) -> None:
        level = _Level(name, [None] * len(self._sources), [])
        taking_part = self._levels[-1].statuses
        self._levels.append(level)
        for index, folder in enumerate(self._sources):
            status = _status(name, folder) if taking_part[index] is not None else None
            if status is None:
                continue
            if not stat.S_ISDIR(status.st_mode):
                break  # a file or a whiteout below a folder: nothing below it takes part
            self._sources[index] = _instead(folder, _enter(name, folder, status.st_mode))
            level.statuses[index] = status
            if len(self._sources) > 1 and is_opaque(self._sources[index]):
                break
        os.mkdir(name, 0o700, dir_fd=self._target)
        self._target = _instead(self._target, os.open(name, _FOLDER, dir_fd=self._target))
        level.folders = self._copy_entries()

    def _go_up(self) -> None:
        """Modes and times of a folder come last: it may be read-only, and writing into it changes its time."""
        shown = self._levels[-1].shown
        self._leave()
        target, self._target = self._target, os.open("..", _FOLDER, dir_fd=self._target)
        self._give(target, shown)
        os.close(target)

    def _leave(self) -> None:
        """Go up in the source. After the top nothing is left to stand in."""
        level = self._levels.pop()
        for index, status in enumerate(level.statuses):
            if status is None:
                continue
            folder = self._sources[index]
            above = self._levels[-1].statuses[index] if self._levels else None
            parent = _parent(folder, above) if above is not None else None
            _lock_again(folder, status)
            if parent is not None:
                self._sources[index] = _instead(folder, parent)

    def _lock_all(self) -> None:
        """After a failure: layers that others stand on must be as they were."""
        with contextlib.suppress(OSError, SandboxError):
            while self._levels:
                self._leave()

    def _copy_entries(self) -> list[str]:
        """Copy everything in the folder but its folders, and give the names of those."""
        folders: list[str] = []
        seen: set[str] | None = set() if len(self._sources) > 1 else None
        for folder, takes_part in zip(self._sources, self._levels[-1].statuses, strict=True):
            if takes_part is not None:
                self._copy_layer(folder, folders, seen)
        return folders

    def _copy_layer(self, folder: int, folders: list[str], seen: set[str] | None) -> None:
        """`seen`: names of the layers above, which hide those of this one."""
        with os.scandir(folder) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if seen is not None:
                    if entry.name in seen:
                        continue
                    seen.add(entry.name)
                    if is_whiteout(status):
                        continue
                self._count(status)
                if stat.S_ISDIR(status.st_mode):
                    folders.append(entry.name)
                elif stat.S_ISLNK(status.st_mode):
                    os.symlink(os.readlink(entry.name, dir_fd=folder), entry.name, dir_fd=self._target)
                    if (owner := self._owner_of(status)) is not None:
                        os.chown(entry.name, *owner, dir_fd=self._target, follow_symlinks=False)
                elif stat.S_ISREG(status.st_mode) and not self._link(entry.name, status):
                    self._copy_file(entry.name, folder, status)

    def _count(self, status: os.stat_result) -> None:
        self.entries += 1
        if status.st_nlink == 1 or stat.S_ISDIR(status.st_mode) or not os.path.lexists(self._first(status)):
            self.size_bytes += status.st_blocks * 512
        check_room(TreeSize(self.entries, self.size_bytes), self._room)

    def _first(self, status: os.stat_result) -> str:
        """Where the first copy of a file with several names is noted, as one more name of it."""
        return f"{self._links}/{status.st_dev}-{status.st_ino}"

    def _link(self, name: str, status: os.stat_result) -> bool:
        """Make one more name of a copy that is there already; an agent's file of 1 GB with 10,000 names is no 10 TB."""
        if status.st_nlink == 1:
            return False
        try:
            os.link(self._first(status), name, dst_dir_fd=self._target, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno != errno.EMLINK:
                raise
            os.unlink(self._first(status))
            return False
        return True

    def _copy_file(self, name: str, folder: int, status: os.stat_result) -> None:
        reader = _open_file(name, folder, status)
        try:
            writer = os.open(name, _NEW_FILE, 0o600, dir_fd=self._target)
            try:
                _copy_data(reader, writer)
                self._give(writer, status)
            finally:
                os.close(writer)
        finally:
            os.close(reader)
        if status.st_nlink > 1:
            os.link(name, self._first(status), src_dir_fd=self._target, follow_symlinks=False)

    def _give(self, fd: int, status: os.stat_result) -> None:
        if (owner := self._owner_of(status)) is not None:
            os.fchown(fd, *owner)
        os.fchmod(fd, stat.S_IMODE(status.st_mode) & 0o1777)
        os.utime(fd, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _owner_of(self, status: os.stat_result) -> tuple[int, int] | None:
        if self._keep_owners:
            return status.st_uid, status.st_gid
        return (self._owner, self._owner) if self._owner is not None else None


def _status(name: str, folder: int) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _instead(old: int, new: int) -> int:
    os.close(old)
    return new


def _enter(name: str, above: int | None, mode: int) -> int:
    """A folder, opened; one whose owner (who may be we) locked himself out is unlocked first."""
    if mode & stat.S_IRWXU != stat.S_IRWXU and stat.S_ISDIR(mode):
        os.chmod(name, stat.S_IMODE(mode) | stat.S_IRWXU, dir_fd=above)
    return os.open(name, _FOLDER, dir_fd=above)


def _lock_again(folder: int, status: os.stat_result) -> None:
    if status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        os.fchmod(folder, stat.S_IMODE(status.st_mode))


def _parent(folder: int, expected: os.stat_result) -> int:
    above = os.open("..", _FOLDER, dir_fd=folder)
    if not os.path.samestat(os.fstat(above), expected):
        os.close(above)
        raise SandboxError("a folder was moved while its tree was walked: something still runs in the sandbox")
    return above


def _open_file(name: str, folder: int, status: os.stat_result) -> int:
    try:
        return os.open(name, _FILE, dir_fd=folder)
    except PermissionError:
        mode = stat.S_IMODE(status.st_mode)
        os.chmod(name, mode | stat.S_IRUSR, dir_fd=folder)
        try:
            return os.open(name, _FILE, dir_fd=folder)
        finally:
            os.chmod(name, mode, dir_fd=folder)


def _copy_data(reader: int, writer: int) -> None:
    try:
        fcntl.ioctl(writer, FICLONE, reader)
        return
    except OSError:
        pass
    size, start = os.fstat(reader).st_size, 0
    os.ftruncate(writer, size)
    while (piece := _next_data(reader, start, size)) is not None:
        start, end = piece
        os.lseek(writer, start, os.SEEK_SET)
        while start < end:
            sent = os.sendfile(writer, reader, start, end - start)
            if sent == 0:
                return
            start += sent


def _next_data(fd: int, start: int, size: int) -> tuple[int, int] | None:
    if start >= size:
        return None
    try:
        begin = os.lseek(fd, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise
    return begin, os.lseek(fd, begin, os.SEEK_HOLE)


@dataclass(slots=True)
class _Removal:
    """The walk of one removal: goes on past what it cannot remove, and keeps the first error."""

    folder: int
    levels: list[_Level]
    failed: list[OSError] = field(default_factory=list)

    def run(self) -> None:
        self.levels[-1].folders = self._clear()
        while self.levels[-1].folders or len(self.levels) > 1:
            if self.levels[-1].folders:
                self._go_down(self.levels[-1].folders.pop())
            else:
                self._go_up()

    def _go_down(self, name: str) -> None:
        try:
            status = os.stat(name, dir_fd=self.folder, follow_symlinks=False)
            below = _enter(name, self.folder, status.st_mode)
        except OSError as error:
            self._note(error)
            return
        self.folder = _instead(self.folder, below)
        self.levels.append(_Level(name, [status], []))
        self.levels[-1].folders = self._clear()

    def _go_up(self) -> None:
        name = self.levels.pop().name
        self.folder = _instead(self.folder, _parent(self.folder, self.levels[-1].shown))
        try:
            os.rmdir(name, dir_fd=self.folder)
        except OSError as error:
            self._note(error)

    def _clear(self) -> list[str]:
        """Remove everything in the folder but its folders, and give the names of those."""
        folders = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                    continue
                try:
                    os.unlink(entry.name, dir_fd=self.folder)
                except OSError as error:
                    self._note(error)
        return folders

    def _note(self, error: OSError) -> None:
        if not self.failed and not isinstance(error, FileNotFoundError):
            self.failed.append(error)


def remove_tree(path: Path) -> None:
    """Remove a tree however deep and whatever its modes, or what is there instead. Raises SandboxError when something is left."""
    try:
        status = os.stat(path, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode):
            os.unlink(path)
            return
        removal = _Removal(_enter(os.fspath(path), None, status.st_mode), [_Level("", [status], [])])
        try:
            removal.run()
        finally:
            os.close(removal.folder)
        if removal.failed:
            raise removal.failed[0]
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SandboxError(f"cannot remove {path}: {error}") from error
