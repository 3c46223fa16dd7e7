"""A hard memory limit by the kernel: a version 1 memory control group below our own, where we may make one.

Below our own, so that whatever limits us goes on limiting what we start. Version 2 gives no such group to a process that is
not alone in its own; there, and for ordinary users, the launcher samples instead.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_PATIENCE_S = 10.0
"""A process that was killed is in its group until the kernel has taken it apart."""


def own_group() -> Path | None:
    """The memory group that this process runs in."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/sys/fs/cgroup/memory" + path)
    return None


def make_group(folder: Path, limit_bytes: int) -> None:
    """Raises OSError where the kernel refuses."""
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(limit_bytes))


def remove_group(folder: str) -> bool:
    """Kill what is in a group of ours and remove it; false where something in it does not die."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            os.rmdir(folder)
            return True
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() > until:
                return False
        _kill_members(folder)
        time.sleep(0.02)


def _kill_members(folder: str) -> None:
    try:
        members = Path(folder, "cgroup.procs").read_text().split()
    except OSError:
        return
    for pid in map(int, members):
        if pid == 0:
            continue  # of a namespace that we do not see into; 0 would be ourselves
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
