"""Processes of a run as the kernel tells of them: the worker below a control process, and whatever is left of a run."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path


class Process:
    """A process by a descriptor of its own, so that a reused id is never meant."""

    def __init__(self, pid: int) -> None:
        self.pid, self._fd = pid, os.pidfd_open(pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        return bool(select.select([self._fd], [], [], timeout_s)[0])


def child_worker(control: int) -> Process | None:
    """The worker that this control process started, once its program runs."""
    for pid in _all():
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == control and b"everlong.orchestrator.cells.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return Process(pid)
        except (OSError, IndexError):
            continue
    return None


def left_over(folder: Path, *, folders: bool, patience_s: float) -> list[str]:
    """Processes that name the run's folder, or see it mounted, after so long; and sandbox folders, where asked for."""
    until = time.monotonic() + patience_s
    while (pids := _processes_of(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    found = [f"process {pid} is left: {_command(pid)}" for pid in pids]
    if folders:
        found += [f"sandbox folder {path.name} is left" for path in (folder / "sandboxes").glob("*")]
    return found


def _processes_of(folder: Path) -> list[int]:
    mark = f"{folder}/".encode()
    return [pid for pid in _all() if any(mark in text for text in _texts(pid))]


def _texts(pid: int) -> Iterator[bytes]:
    for name in ("cmdline", "environ", "mountinfo"):
        try:
            yield Path(f"/proc/{pid}/{name}").read_bytes()
        except OSError:
            continue


def _all() -> list[int]:
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit() and int(entry.name) != os.getpid()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "already gone"
