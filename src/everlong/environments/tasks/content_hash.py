"""One hash of a folder's content: names, bytes and the executable bit of every file, and nothing of where it lies."""

from __future__ import annotations

import os
from pathlib import Path

from blake3 import blake3

_CHUNK_BYTES = 1 << 20


def content_hash(folder: Path) -> str:
    """32 hex digits; equal for the same files in two places, whatever their times, owners and other mode bits.

    Raises ValueError for a file that is neither plain nor a link inside the folder.
    """
    root = folder.resolve()
    total = blake3()
    for path in _files(root):
        name = path.relative_to(root).as_posix().encode()
        kind, digest = _digest(path, root)
        total.update(b"%d:%b%b%b" % (len(name), name, kind, digest))
    return total.hexdigest(16)


def _files(root: Path) -> list[Path]:
    found = []
    for folder, names, files in os.walk(root):
        links = [name for name in names if os.path.islink(os.path.join(folder, name))]
        found += [Path(folder, name) for name in (*files, *links)]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix().encode())


def _digest(path: Path, root: Path) -> tuple[bytes, bytes]:
    if path.is_symlink():
        target = os.readlink(path)
        if os.path.isabs(target) or not path.resolve().is_relative_to(root):
            raise ValueError(f"{path} is a link that leads out of its task folder: put a copy of the file there")
        return b"l", blake3(target.encode()).digest()
    if not path.is_file():
        raise ValueError(f"{path} is neither a file nor a folder: remove it from the task")
    hasher = blake3()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return (b"x" if path.stat().st_mode & 0o100 else b"f"), hasher.digest()
