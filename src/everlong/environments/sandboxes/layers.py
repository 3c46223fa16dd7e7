"""Layers of an overlay (overlayfs) as they lie on the host: how a name is found through them, and how they become one.

A file stands in the topmost layer that has it. A whiteout (a device 0:0) hides what lies below, an opaque folder hides
the content of the same folder below; a folder that is neither is the union of all. The kernel writes these marks when a
command changes an overlay, and this reads and writes the same ones while none is mounted.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_LAYERS = 32
"""A deeper stack is made one layer: every lookup asks each of them, and a mount names them all within one page."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SEARCH = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def opaque_mark() -> str:
    """The attribute of an opaque folder: an ordinary user's overlays cannot use the trusted one."""
    return "trusted.overlay.opaque" if os.geteuid() == 0 else "user.overlay.opaque"


def is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def is_opaque(folder: Path | str | int) -> bool:
    try:
        return os.getxattr(folder, opaque_mark()) == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP, errno.EPERM):
            return False
        raise


def find(folders: list[int], name: str) -> tuple[int, os.stat_result] | None:
    """Which of these open folders (top first, -1 where a layer lacks it) shows the name, and what it is there."""
    for index, folder in enumerate(folders):
        if folder < 0:
            continue
        try:
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            continue
        return None if is_whiteout(status) and len(folders) > 1 else (index, status)
    return None


def enter(folders: list[int], name: str) -> list[int]:
    """The folder `name` of a union, opened in every layer that takes part in it. Raises FileNotFoundError, NotADirectoryError."""
    found = find(folders, name)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no such folder", name)
    entered = [-1] * len(folders)
    try:
        for index in range(found[0], len(folders)):
            if folders[index] < 0:
                continue
            try:
                entered[index] = os.open(name, _SEARCH, dir_fd=folders[index])
            except FileNotFoundError:
                continue
            except NotADirectoryError:
                if index == found[0]:
                    raise
                break  # a file or a whiteout below a folder: nothing below it takes part
            if len(folders) > 1 and is_opaque(f"/proc/self/fd/{entered[index]}"):
                break
    except BaseException:
        close_all(entered)
        raise
    return entered


def close_all(folders: list[int]) -> None:
    for folder in folders:
        if folder >= 0:
            os.close(folder)


def raise_folder(parent: int, name: str, like: int) -> int:
    """Make the folder in the upper layer, with mode and owner as in the layer below it (`like`); gives it opened."""
    status = os.fstat(like)
    os.mkdir(name, stat.S_IMODE(status.st_mode), dir_fd=parent)
    folder = os.open(name, _FOLDER, dir_fd=parent)
    os.fchmod(folder, stat.S_IMODE(status.st_mode))
    if os.geteuid() == 0:
        os.fchown(folder, status.st_uid, status.st_gid)
    return folder


def uncover(parent: int, name: str) -> bool:
    """Remove a whiteout from the upper layer; true where there was one, so that a new folder there must be opaque."""
    try:
        hidden = is_whiteout(os.stat(name, dir_fd=parent, follow_symlinks=False))
    except FileNotFoundError:
        return False
    if hidden:
        os.unlink(name, dir_fd=parent)
    return hidden


def mark_opaque(folder: int) -> None:
    os.setxattr(f"/proc/self/fd/{folder}", opaque_mark(), b"y")
