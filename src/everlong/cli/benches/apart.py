"""A piece of work in a process of its own, where its memory can be told from everything else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from everlong.contracts.import_path import load_named


@dataclass(frozen=True, slots=True)
class Cost:
    seconds: float
    peak_bytes: int
    """Most that the work held beyond what was held when it began."""


def run_apart(case: str, *arguments: int | str) -> Cost:
    """What `case(*arguments).run()` takes, once built; `case` is package.module:name.

    Raises ChildProcessError with the end of what the process wrote to its errors.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", __name__, case, json.dumps(arguments)]
    child = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if child.returncode:
        raise ChildProcessError(f"the process of {case} ended with code {child.returncode}:\n{child.stderr[-2000:]}")
    return Cost(**json.loads(child.stdout))


def _held(field: str) -> int:
    """Bytes: VmRSS is what the process holds now, VmHWM the most that it ever held."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: the memory of a bench is measured on Linux only")


def _measure(case: str, arguments: str) -> Cost:
    work = load_named(case)(*json.loads(arguments))
    before, started = _held("VmRSS"), time.perf_counter()
    work.run()
    return Cost(time.perf_counter() - started, _held("VmHWM") - before)


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(*sys.argv[1:]))))
