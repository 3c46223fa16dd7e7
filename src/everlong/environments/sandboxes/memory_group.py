"""A hard memory limit by the kernel: a version 1 memory control group below our own, where we may make one.

Below our own, so that whatever limits us goes on limiting what we start. Version 2 gives no such group to a process that is
not alone in its own; there, and for ordinary users, the launcher samples instead.
"""

from __future__ import annotations

import os
import time
from pathlib import Path


def usable_parent() -> Path | None:
    """The memory group that we run in, if a limited one can be made below it: found by making one."""
    folder = _own_group()
    if folder is None:
        return None
    trial = folder / f"everlong-trial-{os.getpid()}"
    try:
        make_group(trial, 64 << 20)
    except OSError:
        return None
    finally:
        remove_group(str(trial))
    return folder


def _own_group() -> Path | None:
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


def remove_group(folder: str) -> None:
    """Remove a group whose processes are dead; the kernel may need a moment to see that they are."""
    for _ in range(50):
        try:
            os.rmdir(folder)
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)
