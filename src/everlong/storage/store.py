"""Every backend through obstore, with its errors said in ours."""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, MemoryStore, from_url
from obstore.store import ObjectStore as ObstoreClient

from everlong.contracts.errors import AlreadyExists, NotFound, StoreError
from everlong.contracts.os_errors import explain_os_error
from everlong.storage.keys import as_folder, check_key

if TYPE_CHECKING:
    from obstore.store import RetryConfig

REMOTE_SCHEMES = ("s3", "gs", "az")

# A remote store that does not answer for half a minute is reported, not waited for: callers above decide whether to go on.
RETRIES: RetryConfig = {"max_retries": 5, "retry_timeout": timedelta(seconds=30)}

_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How obstore says what the system refused."""


class ObstoreStore:
    """An `ObjectStore` on one obstore client. Safe to share between threads.

    Every method raises StoreError when the backend refused or could not be reached; remote ones retry for up to 30 s first.
    """

    def __init__(self, client: ObstoreClient, name: str) -> None:
        self._client, self._name = client, name

    def __repr__(self) -> str:
        return f"ObstoreStore({self._name})"

    def create(self, key: str, data: bytes) -> None:
        """Raises AlreadyExists when the key is taken.

        The winner may be this very call, retried after a lost reply: read the object and compare before giving up.
        """
        with self._errors("create", check_key(key)):
            obstore.put(self._client, key, data, mode="create")

    def put(self, key: str, data: bytes) -> None:
        with self._errors("put", check_key(key)):
            obstore.put(self._client, key, data)

    def get(self, key: str) -> bytes:
        """Raises NotFound."""
        with self._errors("get", check_key(key)):
            return obstore.get(self._client, key).bytes().to_bytes()

    def list(self, prefix: str = "") -> list[str]:  # ty: ignore[invalid-type-form]  # the method hides the type
        """Every key below the prefix, sorted. A prefix ends where a name ends: "a" does not cover "ab"."""
        with self._errors("list", prefix):
            return sorted(meta["path"] for page in obstore.list(self._client, as_folder(prefix)) for meta in page)

    def delete(self, key: str) -> None:
        """A key that is not there is no error."""
        try:
            with self._errors("delete", check_key(key)):
                obstore.delete(self._client, key)
        except NotFound:
            pass

    @contextmanager
    def _errors(self, action: str, key: str) -> Generator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{self._name} has no object {key!r}") from error
        except AlreadyExistsError as error:
            raise AlreadyExists(f"{self._name} already has an object {key!r}: read it and compare") from error
        except (BaseError, OSError) as error:
            # obstore appends a debug dump of its own types: the first line is the message.
            reason = str(error).strip().split("\n")[0]
            if number := _OS_ERROR.search(reason):
                reason = explain_os_error(OSError(int(number[1]), os.strerror(int(number[1]))))
            raise StoreError(f"cannot {action} {key!r} in {self._name}: {reason}") from error


def open_store(url: str) -> ObstoreStore:
    """The store behind a folder path, `file://`, `memory://`, `s3://bucket/path`, `gs://bucket/path` or `az://container/path`.

    A folder is made where it does not exist. Two stores opened with `memory://` share nothing. Remote stores take
    credentials and endpoints from the environment (AWS_*, GOOGLE_*, AZURE_*). Raises ValueError for another scheme.
    """
    scheme = urlsplit(url).scheme if "://" in url else ""
    if scheme == "memory":
        return ObstoreStore(MemoryStore(), url)
    if scheme in ("", "file"):
        folder = Path(unquote(urlsplit(url).path) if scheme else url).expanduser().resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return ObstoreStore(LocalStore(folder), str(folder))
    if scheme not in REMOTE_SCHEMES:
        raise ValueError(f"no store for {url!r}: give a folder, file://, memory://, s3://, gs:// or az://")
    try:
        return ObstoreStore(from_url(url, retry_config=RETRIES), url)
    except (BaseError, ValueError) as error:
        raise StoreError(f"cannot open {url}: {str(error).strip().splitlines()[0]}") from error
