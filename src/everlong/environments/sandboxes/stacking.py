"""Stacks of sealed layers: who still needs which, what a new upper layer starts as, and how a stack becomes one layer."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import threading
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from everlong.environments.sandboxes.trees import TreeSize, copy_tree, remove_tree


class Layer:
    """A sealed folder tree that nobody changes any more."""

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number
        self.num_users = 0
        self.walking = threading.Lock()


Stack = tuple[Layer, ...]
"""Top first."""


@contextlib.contextmanager
def alone_in(stack: Stack) -> Generator[None]:
    """A walk unlocks folders that their owner locked for as long as it is in them: a second one would take that for their mode."""
    with contextlib.ExitStack() as held:
        for layer in sorted(stack, key=lambda layer: layer.number):
            held.enter_context(layer.walking)
        yield


@dataclass(frozen=True, slots=True)
class Source:
    """What a workdir is filled with."""

    folders: tuple[Path, ...] = ()
    """The same folder in every layer, top first; none to start empty."""
    stack: Stack = ()
    """The sealed ones among the layers that it lies in."""
    room: TreeSize | None = None
    """What is larger cannot be copied."""


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

    def copy(self, upper: Path, stack: Stack, room: TreeSize) -> Layer:
        """A layer that holds a copy of what `upper` and the stack below it show together, owners included.

        Raises WorkspaceTooLarge beyond `room`.
        """
        layer = self.new()
        try:
            with alone_in(stack):
                copy_tree((upper, *(part.path for part in stack)), layer.path, None, room, keep_owners=True)
        except BaseException:
            remove_tree(layer.path)
            raise
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
        number = next(self._ids)
        return Layer(self.layers_folder / str(number), number)


def empty_like(layer: Path, target: Path, folders: tuple[str, ...]) -> None:
    """An upper layer that changes nothing: its folders have the modes and owners of those below."""
    for path in folders:
        below, here = layer / path.lstrip("/"), target / path.lstrip("/")
        here.mkdir(parents=True)
        status = below.stat(follow_symlinks=False)
        if os.geteuid() == 0:
            os.chown(here, status.st_uid, status.st_gid)
        here.chmod(stat.S_IMODE(status.st_mode))
