"""Files of a sandbox seen from outside: paths are walked without following its links out.

What lies in a sandbox was made by an agent: links may point anywhere and a pipe would block its reader. So every path is
walked one name at a time with O_NOFOLLOW, and links are resolved here, with the sandbox's own root as their root.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from everlong.contracts.errors import SandboxError

_MAX_LINKS = 40
_MAX_FOLDERS = 128
"""Each folder on the way is held open. A link of the agent's may ask for thousands, and every file of the run has one table."""


@dataclass(frozen=True, slots=True)
class Territory:
    """The folders of a sandbox that are its own, as they lie on the host: `root/app` is what commands see as `/app`."""

    root: Path
    folders: tuple[str, ...]
    """Absolute paths inside, for example /app and /tmp."""
    workdir: str
    owner: int | None = None
    """User and group that new files belong to; None for whoever runs this."""

    def host(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def read(self, path: str, max_bytes: int) -> bytes:
        """At most `max_bytes` of a regular file. Raises FileNotFoundError; SandboxError where it leads out."""
        with self._parent(path, create=False) as (folder, name):
            fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
        with open(fd, "rb") as file:
            return file.read(max_bytes)

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a regular file; missing folders on the way are made. Raises SandboxError."""
        with self._parent(path, create=True) as (folder, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            try:
                fd = os.open(name, flags, 0o644, dir_fd=folder)
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
    def _parent(self, path: str, *, create: bool) -> Generator[tuple[int, str]]:
        """The folder that really holds `path`, opened, and the last name, which is no link."""
        pending = _names(posixpath.join(self.workdir, path))
        trail: list[tuple[int, str]] = [(os.open(self.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), "")]
        links = 0
        try:
            while pending:
                name = pending.pop()
                folder = trail[-1][0]
                if name == "..":
                    if len(trail) > 1:
                        os.close(trail.pop()[0])
                    continue
                link = _readlink(name, folder)
                if link is not None:
                    links += 1
                    if links > _MAX_LINKS:
                        raise SandboxError(f"{path} leads through more than {_MAX_LINKS} links")
                    if link.startswith("/"):
                        while len(trail) > 1:
                            os.close(trail.pop()[0])
                    pending += _names(link)
                    continue
                here = "/".join(name for _, name in trail)
                if not pending:
                    self._check_inside(path, f"{here}/{name}")
                    yield folder, name
                    return
                if len(trail) > _MAX_FOLDERS:
                    raise SandboxError(f"{path} leads through more than {_MAX_FOLDERS} folders")
                trail.append((self._enter(folder, name, f"{here}/{name}", path, create), name))
            raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
        finally:
            for fd, _ in trail:
                os.close(fd)

    def _enter(self, folder: int, name: str, here: str, path: str, create: bool) -> int:
        flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return os.open(name, flags, dir_fd=folder)
        except NotADirectoryError:
            raise FileNotFoundError(errno.ENOENT, "a part of it is not a folder", path) from None
        except FileNotFoundError:
            self._check_inside(path, here)
            if not create:
                raise
        os.mkdir(name, 0o755, dir_fd=folder)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        self._own(fd)
        return fd

    def _check_inside(self, path: str, resolved: str) -> None:
        if not any(is_below(resolved, folder) for folder in self.folders):
            raise SandboxError(
                f"{path} leads to {resolved}, out of what can be read and written from outside: {', '.join(self.folders)}"
            )


def is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _names(path: str) -> list[str]:
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _readlink(name: str, folder: int) -> str | None:
    try:
        return os.readlink(name, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT, errno.ENOTDIR):
            return None
        raise
