"""One store holds one run: its versions, checkpoints and episodes are numbered from 0, and two runs would read each other's."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec

from everlong.cli.config import RunConfig
from everlong.cli.run_folder import RunFolder
from everlong.cli.started_model import KEY as MODEL
from everlong.contracts.errors import AlreadyExists, NotFound, StoreError
from everlong.contracts.ports import ObjectStore
from everlong.contracts.records import Record
from everlong.storage import open_store

OWNER = "run.json"
_NUMBERED = ("weights", "checkpoints", "episodes")
"""Keys below these belong to one run."""


class StoreOwner(Record, frozen=True, kw_only=True):
    """The run that a store belongs to, as it lies in the store.

    Example: StoreOwner(folder="/home/ann/runs/terminal", host="node7")
    """

    folder: str
    host: str


def refuse_taken_store(config: RunConfig, folder: RunFolder) -> None:
    """Raises ValueError where the store of a new run holds another one, StoreError where it cannot be read. Writes nothing."""
    url = folder.absolute_store_url(config)
    if (path := _local(url)) is not None and not path.exists():
        return
    store = open_store(url)
    owner, used = _owner(store), any(store.list(prefix) for prefix in _NUMBERED)
    if used or owner not in (None, _ours(folder)):
        _refuse(url, owner)


def claim_store(config: RunConfig, folder: RunFolder) -> None:
    """Write down in the store whose it is. Raises ValueError where another run was faster, StoreError where the store would let
    two writers overwrite each other."""
    url, ours = folder.absolute_store_url(config), _ours(folder)
    store = open_store(url)
    if not _create(store, ours) and (owner := _owner(store)) != ours:
        _refuse(url, owner)
    store.delete(MODEL)  # of a start that came to nothing
    if _create(store, ours):
        raise StoreError(
            f"the store {url} took an object that was there already: its server ignores create-only writes (If-None-Match), by "
            "which of two writers one wins; use one that honours them, or a folder"
        )


def _create(store: ObjectStore, owner: StoreOwner) -> bool:
    """Whether the store took it."""
    try:
        store.create(OWNER, msgspec.json.encode(owner))
    except AlreadyExists:
        return False
    return True


def disown_store(config: RunConfig, folder: RunFolder) -> None:
    """Take back `claim_store`, where it was this run's."""
    url = folder.absolute_store_url(config)
    if (path := _local(url)) is not None and not path.is_dir():
        return
    store = open_store(url)
    if _owner(store) == _ours(folder):
        store.delete(OWNER)


def _refuse(url: str, owner: StoreOwner | None) -> None:
    whose = "a run that did not say its name" if owner is None else f"the run {owner.folder} on {owner.host}"
    raise ValueError(
        f"the store {url} must be empty for a new run, and belongs to {whose}: give each run a store of its own with "
        f"--weights.store, or go on with that run by `everlong resume`"
    )


def _ours(folder: RunFolder) -> StoreOwner:
    return StoreOwner(folder=str(folder.path.resolve()), host=socket.gethostname())


def _owner(store: ObjectStore) -> StoreOwner | None:
    try:
        return msgspec.json.decode(store.get(OWNER), type=StoreOwner)
    except NotFound:
        return None
    except msgspec.DecodeError as error:
        raise StoreError(f"{OWNER} in {store!r} is damaged ({error}): give the run another store") from error


def local_store(config: RunConfig, folder: RunFolder) -> Path | None:
    """The folder of the run's store, where it is one of this machine."""
    return _local(folder.absolute_store_url(config))


def _local(url: str) -> Path | None:
    """The folder of a store on this machine, which opening would make."""
    scheme = urlsplit(url).scheme if "://" in url else ""
    return Path(unquote(urlsplit(url).path) if scheme else url) if scheme in ("", "file") else None
