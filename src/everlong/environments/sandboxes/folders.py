"""Files of a sandbox seen from outside: paths are walked without following its links out.

What lies in a sandbox was made by an agent: links may point anywhere and a pipe would block its reader. So every path is
walked one name at a time with O_NOFOLLOW, and links are resolved here, with the sandbox's own root as their root.
"""

from __future__ import annotations

import errno
import itertools
import os
import posixpath
import stat
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from everlong.contracts.errors import SandboxError
from everlong.environments.sandboxes import layers

_MAX_LINKS = 40
_MAX_FOLDERS = 128
"""Each folder on the way is held open. A link of the agent's may ask for thousands, and every file of the run has one table."""
_MAX_OPEN = 4 * _MAX_FOLDERS
"""With layers, a folder is held open in each that has it."""

Trail = list[tuple[list[int], str]]
"""From the sandbox's root to a folder: each one opened in every layer (-1 where a layer lacks it), and its name."""


@dataclass(frozen=True, slots=True)
class Territory:
    """The folders of a sandbox that are its own, as they lie on the host: `root/app` is what commands see as `/app`."""

    root: Path
    folders: tuple[str, ...]
    """Absolute paths inside, for example /app and /tmp."""
    workdir: str
    owner: int | None = None
    """User and group that new files belong to; None for whoever runs this."""
    lowers: tuple[Path, ...] = ()
    """Sealed layers that show through below `root`, top first; written while no command runs."""

    def host(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def read(self, path: str, max_bytes: int) -> bytes:
        """At most `max_bytes` of a regular file. Raises FileNotFoundError; SandboxError where it leads out."""
        with self._parent(path, create=False) as (trail, name):
            found = layers.find(trail[-1][0], name)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=trail[-1][0][found[0]])
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
        with open(fd, "rb") as file:
            return file.read(max_bytes)

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a regular file; missing folders on the way are made. Raises SandboxError."""
        with self._parent(path, create=True) as (trail, name):
            found = layers.find(trail[-1][0], name)
            if found is not None and not stat.S_ISREG(found[1].st_mode):
                raise SandboxError(f"cannot write {path} in the sandbox: it is not a regular file, remove it first")
            folder = _in_upper(trail)
            if self.lowers:
                layers.uncover(folder, name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                fd = os.open(name, flags, 0o644 if found is None else stat.S_IMODE(found[1].st_mode), dir_fd=folder)
            except OSError as error:
                raise SandboxError(f"cannot write {path} in the sandbox: {error.strerror}") from error
        with open(fd, "wb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise SandboxError(f"cannot write {path} in the sandbox: it is not a regular file, remove it first")
            self._own(fd)
            file.truncate()
            file.write(data)

    def take(self, folders: tuple[str, ...]) -> None:
        """Make these folders (not what is in them) belong to the owner."""
        if self.owner is not None:
            for path in folders:
                os.chown(self.host(path), self.owner, self.owner)

    def _own(self, fd: int) -> None:
        if self.owner is not None:
            os.fchown(fd, self.owner, self.owner)

    @contextmanager
    def _parent(self, path: str, *, create: bool) -> Generator[tuple[Trail, str]]:
        """The way to the folder that really holds `path`, opened in every layer, and the last name, which is no link."""
        pending = _names(posixpath.join(self.workdir, path))
        flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
        trail: Trail = [([os.open(root, flags) for root in (self.root, *self.lowers)], "")]
        links = 0
        try:
            while pending:
                name = pending.pop()
                if name == "..":
                    if len(trail) > 1:
                        layers.close_all(trail.pop()[0])
                    continue
                link = _readlink(name, trail[-1][0])
                if link is not None:
                    links += 1
                    if links > _MAX_LINKS:
                        raise SandboxError(f"{path} leads through more than {_MAX_LINKS} links")
                    if link.startswith("/"):
                        while len(trail) > 1:
                            layers.close_all(trail.pop()[0])
                    pending += _names(link)
                    continue
                here = "/".join(name for _, name in trail)
                if not pending:
                    self._check_inside(path, f"{here}/{name}")
                    yield trail, name
                    return
                held = sum(fd >= 0 for folders, _ in trail for fd in folders)
                if len(trail) > _MAX_FOLDERS or held > _MAX_OPEN:
                    raise SandboxError(f"{path} leads through more than {_MAX_FOLDERS} folders")
                trail.append((self._enter(trail, name, f"{here}/{name}", path, create), name))
            raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
        finally:
            for folders, _ in trail:
                layers.close_all(folders)

    def _enter(self, trail: Trail, name: str, here: str, path: str, create: bool) -> list[int]:
        try:
            return layers.enter(trail[-1][0], name)
        except NotADirectoryError:
            raise FileNotFoundError(errno.ENOENT, "a part of it is not a folder", path) from None
        except FileNotFoundError:
            self._check_inside(path, here)
            if not create:
                raise
        folder = _in_upper(trail)
        hidden = bool(self.lowers) and layers.uncover(folder, name)
        os.mkdir(name, 0o755, dir_fd=folder)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        self._own(fd)
        if hidden:
            layers.mark_opaque(fd)
        return [fd, *(-1 for _ in self.lowers)]

    def _check_inside(self, path: str, resolved: str) -> None:
        if not any(is_below(resolved, folder) for folder in self.folders):
            raise SandboxError(
                f"{path} leads to {resolved}, out of what can be read and written from outside: {', '.join(self.folders)}"
            )


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _names(path: str) -> list[str]:
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _readlink(name: str, folders: list[int]) -> str | None:
    found = layers.find(folders, name)
    if found is None or not stat.S_ISLNK(found[1].st_mode):
        return None
    try:
        return os.readlink(name, dir_fd=folders[found[0]])
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def _in_upper(trail: Trail) -> int:
    """The last folder of the way, in the upper layer: it and those above it are made there where they are not."""
    for (above, _), (folders, name) in itertools.pairwise(trail):
        if folders[0] < 0:
            like = next(folder for folder in folders if folder >= 0)
            folders[0] = layers.raise_folder(above[0], name, like)
    return trail[-1][0][0]
