"""Checkpoints of gVisor sandboxes on disk: whole, or beside an earlier one.

A checkpoint is a folder of three files, of which `pages.img` holds the memory and is nearly all of it. With a parent only its
new pages are kept. An image whose pages others refer to stays until they are gone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from everlong.environments.sandboxes.chunks import StoredImage, digest_image, store_increment, write_image
from everlong.environments.sandboxes.trees import remove_tree

_PAGES = "pages.img"


class Image:
    """One checkpoint."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number
        self.stored: StoredImage | None = None
        self.parents: tuple[Image, ...] = ()
        """Whose pages it refers to."""
        self.num_users = 0

    @property
    def is_whole(self) -> bool:
        return (self.folder / _PAGES).exists()


class ImageStore:
    """Images below `root`. Only one thread works on it at a time."""

    def __init__(self, root: Path) -> None:
        self._images_folder = root
        self._count = 0
        root.mkdir()

    def begin(self) -> Image:
        """An empty folder for `runsc checkpoint`, held by the caller until `let_go`."""
        image = Image(self._images_folder / str(self._count), self._count)
        self._count += 1
        image.folder.mkdir()
        image.num_users = 1
        return image

    def shrink(self, image: Image, parent: Image) -> None:
        """Keep of a fresh checkpoint only what the parent lacks."""
        if parent.stored is None:
            parent.stored = digest_image(parent.folder / _PAGES, parent.number)
        pages = image.folder / _PAGES
        image.stored = store_increment(pages, image.number, parent.stored, image.folder / "pages.new")
        referred = set(image.stored.places[:, 0].tolist()) - {image.number}
        image.parents = tuple(one for one in (parent, *parent.parents) if one.number in referred)
        for one in image.parents:
            one.num_users += 1
        pages.unlink()

    @contextmanager
    def whole(self, image: Image) -> Generator[Path]:
        """A folder that `runsc restore` can read, for as long as the block lasts."""
        if image.is_whole:
            yield image.folder
            return
        assert image.stored is not None
        folder = Path(tempfile.mkdtemp(prefix=f"{image.number}-whole-", dir=self._images_folder))
        try:
            for file in image.folder.iterdir():
                if file.name != "pages.new":
                    os.link(file, folder / file.name)
            files = {one.number: one.stored.file for one in (image, *image.parents) if one.stored is not None}
            write_image(image.stored, files, folder / _PAGES)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def let_go(self, image: Image) -> None:
        image.num_users -= 1
        if image.num_users == 0:
            remove_tree(image.folder)
            for parent in image.parents:
                self.let_go(parent)


def stored_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())
