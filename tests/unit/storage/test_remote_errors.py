"""A bucket's answers in our words, against a loopback server that speaks just enough HTTP."""

import os
import threading
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from everlong.contracts.errors import AlreadyExists, NotFound, StoreError
from everlong.storage import open_store

STATUS = {"taken": 412, "missing": 404, "forbidden": 403, "lost": 404}
BODIES = {"lost": b"<Error><Code>NoSuchBucket</Code></Error>"}


class _Bucket(BaseHTTPRequestHandler):
    """Answers by the last name of the key: with a status, or stores the object."""

    objects: dict[str, bytes] = {}

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self.path.split("?")[0].rsplit("/", 1)[-1]
        status = STATUS.get(name, 200)
        if status == 200 and self.command == "PUT":
            self.objects[self.path] = body
        content = self.objects.get(self.path, b"") if self.command == "GET" and status == 200 else BODIES.get(name, b"")
        if self.command == "POST":  # deletes come as a list
            status, content = 200, b"<DeleteResult><Deleted><Key>run/missing</Key></Deleted></DeleteResult>"
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = _answer

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Bucket)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    settings = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield "s3://bucket/run"
    server.shutdown()
    thread.join()
    server.server_close()


def test_bucket_url_puts_and_gets_below_its_path(bucket: str) -> None:
    store = open_store(bucket)
    store.put("weights/a", b"bits")
    assert store.get("weights/a") == b"bits"
    assert list(_Bucket.objects) == ["/bucket/run/weights/a"]


def test_bucket_errors_are_named(bucket: str) -> None:
    store = open_store(bucket)
    with pytest.raises(AlreadyExists):
        store.create("taken", b"x")
    with pytest.raises(NotFound):
        store.get("missing")
    with pytest.raises(StoreError, match="cannot get 'forbidden' in s3://bucket/run"):
        store.get("forbidden")
    store.delete("missing")


def test_a_bucket_that_is_not_there_is_no_object_that_is_not_there(bucket: str) -> None:
    store = open_store(bucket)
    for act in (lambda: store.get("lost"), lambda: store.create("lost", b"x")):
        with pytest.raises(StoreError, match="NoSuchBucket.*the bucket does not exist there: create it") as missing:
            act()
        assert not isinstance(missing.value, NotFound)


def test_a_signature_in_the_address_is_in_no_message(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure takes its shared signature as part of every URL, and the client prints URLs."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2024&sig=hush")
    with pytest.raises(StoreError, match="403 Forbidden: the server refused the credentials") as refusal:
        open_store("az://bucket/run").get("forbidden")
    assert "hush" not in "".join(traceback.format_exception(refusal.value))
