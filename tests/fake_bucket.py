"""A loopback server that speaks just enough of S3 to answer with what is hard to get from a real one."""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

STATUS = {"taken": 412, "missing": 404, "forbidden": 403, "lost": 404}
BODIES = {"lost": b"<Error><Code>NoSuchBucket</Code></Error>"}


class Bucket(BaseHTTPRequestHandler):
    """Answers by the last name of the key: with a status, or stores the object, also where one is there and none may be."""

    objects: dict[str, bytes] = {}
    breaks = 0
    """So many requests for a key that ends with "broken" are met with a reset."""

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self.path.split("?")[0].rsplit("/", 1)[-1]
        if name == "broken" and Bucket.breaks:
            Bucket.breaks -= 1
            # a reset, as from a server that was killed, and no orderly end
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.rfile.close()
            self.connection.close()
            return
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


@contextmanager
def fake_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its URL; the environment is the one that reaches it."""
    Bucket.objects.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
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
