"""Images of memory, stored beside an earlier one: only the pages that it lacks.

A page is found by its content (blake3, 128 bits), wherever in the image it stood. What is new goes into `pages.new`, and
`pages.index` says for every page of the image which file holds it and at which page of that file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

PAGE_BYTES = 4096
_READ_PAGES = 1024
Digests = dict[bytes, tuple[int, int]]
"""Content of a page to the snapshot that holds it and where in its file."""


@dataclass(slots=True)
class StoredImage:
    """One image: a file of pages of its own, and where each of its pages is."""

    file: Path
    number: int
    """Names it among those that later ones refer to."""
    places: np.ndarray
    """int64 [num_pages, 2]: number of the image whose file holds the page, index of the page in that file."""
    num_bytes: int
    digests: Digests


def digest_image(file: Path, number: int) -> StoredImage:
    """An image that is stored whole."""
    digests: Digests = {}
    count = 0
    for page in _pages(file):
        digests.setdefault(blake3(page).digest(16), (number, count))
        count += 1
    places = np.stack([np.full(count, number), np.arange(count)], axis=1)
    return StoredImage(file, number, places, file.stat().st_size, digests)


def store_increment(file: Path, number: int, parent: StoredImage, target: Path) -> StoredImage:
    """Write to `target` the pages of `file` that the parent lacks."""
    digests: Digests = {}
    places: list[tuple[int, int]] = []
    count = 0
    with open(target, "wb") as new:
        for page in _pages(file):
            digest = blake3(page).digest(16)
            place = digests.get(digest) or parent.digests.get(digest)
            if place is None:
                new.write(page.ljust(PAGE_BYTES, b"\0"))
                place = (number, count)
                count += 1
            digests[digest] = place
            places.append(place)
    array = np.asarray(places, np.int64).reshape(-1, 2)
    return StoredImage(target, number, array, file.stat().st_size, digests)


def write_image(image: StoredImage, files: dict[int, Path], target: Path) -> None:
    """Put the image together again. `files`: those of every image that it refers to, by number."""
    handles = {number: os.open(files[number], os.O_RDONLY) for number in set(image.places[:, 0].tolist())}
    try:
        with open(target, "wb") as out:
            for number, first, count in _runs(image.places):
                left, at = count * PAGE_BYTES, first * PAGE_BYTES
                while left and (part := os.pread(handles[number], min(left, 1 << 22), at)):
                    out.write(part)
                    left, at = left - len(part), at + len(part)
            out.truncate(image.num_bytes)
    finally:
        for handle in handles.values():
            os.close(handle)


def _runs(places: np.ndarray) -> list[tuple[int, int, int]]:
    """Stretches of pages that follow each other in one file: its number, the first page, how many."""
    if not len(places):
        return []
    breaks = np.flatnonzero((np.diff(places[:, 0]) != 0) | (np.diff(places[:, 1]) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    counts = np.diff(np.concatenate([starts, [len(places)]]))
    return [(int(places[s, 0]), int(places[s, 1]), int(n)) for s, n in zip(starts, counts, strict=True)]


def _pages(file: Path):
    with open(file, "rb", buffering=0) as source:
        while block := source.read(_READ_PAGES * PAGE_BYTES):
            for start in range(0, len(block), PAGE_BYTES):
                yield block[start : start + PAGE_BYTES]
