"""Stacks of sealed layers: who still needs which, what a new upper layer starts as, and how a stack becomes one layer."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from pathlib import Path

from everlong.environments.sandboxes.folders import copy_file, copy_tree, remove_tree
from everlong.environments.sandboxes.layers import is_opaque


class Layer:
    """A sealed folder tree that nobody changes any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_users = 0


Stack = tuple[Layer, ...]
"""Top first."""


class LayerStore:
    """Sealed layers below `root`; one is removed when nobody needs it."""

    def __init__(self, root: Path) -> None:
        self.layers_folder = root
        self._ids = itertools.count()

    def seal(self, upper: Path) -> Layer:
        """Take a folder out of its place; it costs a rename, whatever is in it."""
        layer = self._next()
        os.rename(upper, layer.path)
        return layer

    def copy(self, source: Path) -> Layer:
        """A layer that holds a copy of a plain folder tree, owners included."""
        layer = self._next()
        layer.path.mkdir()
        copy_tree(source, layer.path, None, keep_owners=True)
        return layer

    def flatten(self, stack: Stack) -> Layer:
        """One layer that shows what the stack shows."""
        layer = self._next()
        layer.path.mkdir()
        merge(tuple(part.path for part in stack), layer.path)
        return layer

    def hold(self, stack: Stack) -> Stack:
        for layer in stack:
            layer.num_users += 1
        return stack

    def let_go(self, stack: Stack) -> None:
        for layer in stack:
            layer.num_users -= 1
            if layer.num_users == 0:
                remove_tree(layer.path)

    def new(self) -> Layer:
        """An empty layer for the caller to fill."""
        layer = self._next()
        layer.path.mkdir()
        return layer

    def _next(self) -> Layer:
        self.layers_folder.mkdir(exist_ok=True)
        return Layer(self.layers_folder / str(next(self._ids)))


def empty_like(layer: Path, target: Path, folders: tuple[str, ...]) -> None:
    """An upper layer that changes nothing: its folders have the modes and owners of those below."""
    for path in folders:
        below, here = layer / path.lstrip("/"), target / path.lstrip("/")
        here.mkdir(parents=True)
        status = below.stat(follow_symlinks=False)
        if os.geteuid() == 0:
            os.chown(here, status.st_uid, status.st_gid)
        here.chmod(stat.S_IMODE(status.st_mode))


def merge(layers: tuple[Path, ...], target: Path) -> None:
    """Make the folder `target` what the layers (top first) show together."""
    for layer in reversed(layers):
        _lay_over(layer, target)


def _lay_over(layer: Path, target: Path) -> None:
    with os.scandir(layer) as entries:
        for entry in entries:
            there = target / entry.name
            status = entry.stat(follow_symlinks=False)
            is_folder = stat.S_ISDIR(status.st_mode)
            if os.path.lexists(there) and not (is_folder and there.is_dir() and not there.is_symlink()):
                _remove(there)
            elif is_folder and there.is_dir() and is_opaque(entry.path):
                remove_tree(there)
            if is_folder:
                there.mkdir(exist_ok=True)
                _lay_over(Path(entry.path), there)
            elif stat.S_ISLNK(status.st_mode):
                os.symlink(os.readlink(entry.path), there)
            elif stat.S_ISREG(status.st_mode):
                copy_file(entry.path, there)
            else:
                continue
            if os.geteuid() == 0:
                os.chown(there, status.st_uid, status.st_gid, follow_symlinks=False)
            if not stat.S_ISLNK(status.st_mode):
                there.chmod(stat.S_IMODE(status.st_mode) & 0o1777)
                os.utime(there, ns=(status.st_atime_ns, status.st_mtime_ns))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
