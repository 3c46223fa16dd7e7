"""One peer in a process of its own: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from everlong.cli.benches.peers.environment import peers_python


class Peer:
    """Runs `<script>.py` of this folder with `job` as its argument; ready once it has written its first line."""

    def __init__(self, script: str, job: dict[str, Any], threads: int) -> None:
        environment = {
            **os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        environment.pop("PYTHONPATH", None)  # it imports nothing of ours
        self._script = script
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the peer
        command = [peers_python(), Path(__file__).with_name(f"{script}.py"), json.dumps({**job, "threads": threads})]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        self.ready = self._read()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Raises ChildProcessError with the end of what the peer wrote to its errors where it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which reading says with its reason
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        raise ChildProcessError(f"the peer {self._script} ended with code {code}:\n{self._errors.read()[-2000:]}")
