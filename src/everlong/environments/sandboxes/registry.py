"""Who owns which sandbox folders, so that what a killed manager left behind is found and removed, and nothing else.

`root/run-XXXXXXXX/lock` is locked (flock) for as long as its manager lives: the kernel lets go of it however the manager ends,
and no process id can be mistaken for another. A
child that was just forked holds it too, until its program begins: where the process that the file names is gone, that is waited for. `root/run-XXXXXXXX/memory_groups` lists the control groups it made.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from everlong.environments.sandboxes.memory_group import make_group, own_group, remove_group
from everlong.environments.sandboxes.trees import remove_tree

MARKER = "EVERLONG_SANDBOX"
"""Environment variable by which a sandbox's processes are found where no namespace holds them together."""
_GROUPS = "memory_groups"
_PREFIX = "run-"
_FORKED_S = 5.0


class Claim:
    """A fresh folder below `root` that belongs to this process until `release`."""

    def __init__(self, root: Path, prefix: str = _PREFIX) -> None:
        root.mkdir(parents=True, exist_ok=True)
        while True:
            self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
            lock = _try_lock(self.folder / "lock", create=True)
            if lock is not None:
                self._lock = lock
                return
            # A sweep of somebody else came between the two lines above and took it for a leftover.

    def make_group(self, group: Path, limit_bytes: int) -> None:
        """Noted before it is made, so that none can be forgotten."""
        with open(self.folder / _GROUPS, "a") as file:
            file.write(f"{group}\n")
        make_group(group, limit_bytes)

    def usable_groups(self) -> Path | None:
        """The memory group that we run in, if a limited one can be made below it: found by making one."""
        folder = own_group()
        if folder is None:
            return None
        trial = folder / f"everlong-{self.folder.name}-trial"
        try:
            self.make_group(trial, 64 << 20)
        except OSError:
            return None
        finally:
            remove_group(str(trial))
        return folder

    def release(self) -> None:
        """Idempotent."""
        if self._lock >= 0:
            _clear(self.folder)
            os.close(self._lock)
            self._lock = -1


@contextmanager
def scratch_folder(purpose: str, root: Path | None = None) -> Generator[Path]:
    """A folder that is gone after the block; what killed processes left of the same purpose is removed first.

    `root`: None is the system's temporary folder.
    """
    place, prefix = root or Path(tempfile.gettempdir()), f"everlong-{purpose}-"
    claim = Claim(place, prefix)
    try:
        sweep(place, prefix)
        yield claim.folder
    finally:
        claim.release()


def sweep(root: Path, prefix: str = _PREFIX) -> list[Path]:
    """Remove every folder of ours below `root` whose manager is dead, with its processes and groups; gives their paths."""
    swept = []
    for folder in sorted(root.glob(f"{prefix}*")):
        if not _is_ours(folder):
            continue
        lock = _try_lock(folder / "lock", create=False)
        if lock is not None:
            try:
                _clear(folder)
            finally:
                os.close(lock)
        elif not _remove_empty(folder):
            continue
        if not folder.exists():
            swept.append(folder)
    return swept


def _remove_empty(folder: Path) -> bool:
    """Whether it was empty: its manager died, or is, between making it and locking it (and then makes another one)."""
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def _is_ours(folder: Path) -> bool:
    """In a folder that everybody writes to, somebody may have put a link or a trap under such a name."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _clear(folder: Path) -> None:
    """Remove what a manager made. The lock goes last: whoever is killed on the way leaves a folder that the next one finds."""
    kill_marked(f"{folder}/")
    groups = folder / _GROUPS
    made = groups.read_text().splitlines() if groups.exists() else []
    left = [group for group in made if not remove_group(group)]
    kept = {"lock", _GROUPS} if left else {"lock"}
    for entry in list(folder.glob("*")):
        if entry.name not in kept:
            remove_tree(entry)
    if not left:  # else the next one tries again
        remove_tree(folder)


def _try_lock(path: Path, *, create: bool) -> int | None:
    """The open lock file; None while another process holds it, or where it is gone."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        return None
    try:
        until = time.monotonic() + _FORKED_S
        while not _lock_now(fd):
            if create or not _owner_is_gone(fd) or time.monotonic() > until:
                os.close(fd)
                return None
            time.sleep(0.02)
        if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
            if create:
                os.pwrite(fd, f"{os.getpid()} {_began(os.getpid())}".encode(), 0)
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _lock_now(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _owner_is_gone(fd: int) -> bool:
    """Whether the process that made this lock has ended; one that has not said its name yet has not."""
    pid, _, began = os.pread(fd, 100, 0).decode().partition(" ")
    return pid.isdigit() and _began(int(pid)) != began


def _began(pid: int) -> str:
    """When it began, in ticks: no two processes of one id share it. Empty where there is none, or where it is dead already."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return ""
    return "" if words[0] in "ZX" else words[19]


def kill_marked(prefix: str) -> list[int]:
    """Kill our own processes whose marker starts with `prefix`; gives their ids.

    In namespaces everything dies with the manager; without them a process whose launcher was killed too may be left.
    """
    killed = []
    wanted = f"{MARKER}={prefix}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            pidfd = os.pidfd_open(int(entry.name))
        except OSError:
            continue
        try:
            environment = Path(entry.path, "environ").read_bytes()
            if any(word.startswith(wanted) for word in environment.split(b"\0")):
                _kill(pidfd)
                killed.append(int(entry.name))
        except OSError:
            continue
        finally:
            os.close(pidfd)
    return killed


def _kill(pidfd: int) -> None:
    """Through the descriptor, so that a process id that was taken over meanwhile is not hit; then wait until it is dead."""

    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    select.select([pidfd], [], [], 5.0)
