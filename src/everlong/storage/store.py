"""Every backend through obstore, with its errors said in ours."""

from __future__ import annotations

import os
import time
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
from everlong.storage.keys import as_folder, check_key
from everlong.storage.reasons import bucket_is_missing, nobody_answered, reason_of

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

VARIABLES = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
"""How the environment's variables begin, by the scheme of a remote URL."""

PATIENCE = timedelta(seconds=30)
"""A remote store that is away for half a minute is reported, not waited for: callers above decide whether to go on. That is
enough for a server that starts again."""

PAUSE_S = 0.5
# Only time ends the retries: with few of them a server that refuses connections would be given up within a second.
RETRIES: RetryConfig = {
    "max_retries": 1000,
    "retry_timeout": PATIENCE,
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
}
# Silence is measured and not the whole transfer, which for a checkpoint on a slow line takes longer than any outage.
CLIENT: ClientConfig = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": PATIENCE,
    "timeout": timedelta(hours=1),
}
# The client reads these from the environment by itself only where it is given no options at all.
_OF_THE_ENVIRONMENT = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "proxy_url",
    "read_timeout",
    "timeout",
)


class ObstoreStore:
    """An `ObjectStore` on one obstore client. Safe to share between threads.

    Every method raises StoreError when the backend refused or could not be reached. Remote ones try again for 30 s first; a
    server that takes a request and then says nothing is given up after 30 s, or after 60 s where it came back in between.
    """

    def __init__(self, client: ObstoreClient, name: str) -> None:
        self._client, self._name = client, name

    def __repr__(self) -> str:
        return f"ObstoreStore({self._name})"

    def create(self, key: str, data: bytes) -> None:
        """Raises AlreadyExists when the key is taken.

        The winner may be this very call, retried after a lost reply: read the object and compare before giving up.
        """
        until = time.monotonic() + PATIENCE.total_seconds()
        with self._errors("create", check_key(key)):
            while not self._created(key, data, until):
                time.sleep(PAUSE_S)

    def _created(self, key: str, data: bytes, until: float) -> bool:
        """False where it is to be tried again: the client gives a create up when its connection breaks under way, since it cannot
        know whether it arrived; callers can, by what lies there."""
        try:
            obstore.put(self._client, key, data, mode="create")
        except BaseError as error:
            if nobody_answered(error) and time.monotonic() < until:
                return False
            raise
        return True

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
        except AlreadyExistsError:
            raise AlreadyExists(f"{self._name} already has an object {key!r}: read it and compare") from None
        except (BaseError, OSError) as error:
            if isinstance(error, FileNotFoundError) and not bucket_is_missing(error):
                raise NotFound(f"{self._name} has no object {key!r}") from None
            raise StoreError(f"cannot {action} {key!r} in {self._name}: {reason_of(error)}") from None


def open_store(url: str) -> ObstoreStore:
    """The store behind a folder path, `file://`, `memory://`, `s3://bucket/path`, `gs://bucket/path` or `az://container/path`.

    A folder is made where it does not exist. Two stores opened with `memory://` share nothing. Remote stores take
    credentials and endpoints from the environment (AWS_*, GOOGLE_*, AZURE_*). Raises ValueError for another scheme, and for
    a remote URL that holds more than bucket and path.
    """
    scheme = urlsplit(url).scheme if "://" in url else ""
    if scheme == "memory":
        return ObstoreStore(MemoryStore(), url)
    if scheme in ("", "file"):
        folder = Path(unquote(urlsplit(url).path) if scheme else url).expanduser().resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return ObstoreStore(LocalStore(folder), str(folder))
    if scheme not in VARIABLES:
        raise ValueError(
            f"no store for {url!r}: give a folder, file:///FOLDER, s3://BUCKET/PATH, gs://BUCKET/PATH or az://CONTAINER/PATH"
        )
    _refuse_secrets(url)
    if not urlsplit(url).netloc:
        raise ValueError(f"the URL of a store names a bucket, {scheme}://BUCKET or {scheme}://BUCKET/PATH, got {url!r}")
    try:
        return ObstoreStore(from_url(url, retry_config=RETRIES, client_options=_client_options(scheme)), url)
    except (BaseError, ValueError) as error:
        raise StoreError(f"cannot open {url}: {reason_of(error)}") from None


def _client_options(scheme: str) -> ClientConfig:
    variables = {name: f"{VARIABLES[scheme]}_{name.upper()}" for name in _OF_THE_ENVIRONMENT}
    given = {name: os.environ[variable] for name, variable in variables.items() if variable in os.environ}
    return {**CLIENT, **given}


def _refuse_secrets(url: str) -> None:
    """Of a URL that would be written into a run's files. The message must not repeat them."""
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            f"the URL of a store is {parts.scheme}://, a bucket and a path, and this one holds a user, a query or a fragment, "
            "which would have no effect and be written down: give credentials in the environment (docs/storage.md)"
        )
