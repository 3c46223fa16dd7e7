"""What attacks are after, set up on the host: secrets, a process, sockets, shared memory, a key; and whether any of it was harmed."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

_libc = ctypes.CDLL(None, use_errno=True)
_IPC_CREATE, _IPC_REMOVE = 0o1000, 0
_JOIN_SESSION, _SESSION_KEYRING = 1, -3


def call_keys(call: str, *arguments: object) -> int:
    """add_key or keyctl; glibc knows neither."""
    numbers = {"add_key": (248, 217), "keyctl": (250, 219)}[call]
    return int(_libc.syscall(numbers[os.uname().machine != "x86_64"], *arguments))


def new_word() -> str:
    """A secret that is a number, so that a `sleep` may have it on its command line."""
    return f"0.{random.SystemRandom().randrange(10**11, 10**12)}"


class Stage:
    """Open it with `with`. `folder`: a fresh one of its own; `given`: the folder that the sandbox sees read-only."""

    def __init__(self, folder: Path, given: Path, root: Path, word: str) -> None:
        self.folder, self.word, self.mark = folder, word, new_word().replace("0.", "7531.")
        self.secret = folder / "host" / "secret"
        self._given = given
        self._shm = Path(f"/dev/shm/everlong-attack-{self.mark}")
        self._sockets: list[socket.socket] = []
        self.aim: dict[str, object] = {
            "word": word,
            "mark": self.mark,
            "secret": str(self.secret),
            "root": str(root),
            "given": str(given / "id"),
            "workdir": str(folder / "control"),
            "abstract": f"everlong-attack-{self.mark}",
            "socket": str(folder / "socket"),
            "shm": self._shm.name,
            "segment": random.SystemRandom().randrange(1 << 20, 1 << 30),
            "key": f"everlong-attack-{self.mark}",
            "addresses": ["127.0.0.1"],
            "disk": os.stat("/").st_dev,
            "names": 0,
        }

    def __enter__(self) -> Stage:
        (self.folder / "control").mkdir(parents=True)
        self.secret.parent.mkdir()
        self.secret.write_text(self.word)
        self.secret.chmod(0o600)
        self._program = (self._given / "id").read_bytes()
        self.victim = subprocess.Popen(["sleep", "600", self.word], env={"EVERLONG_WORD": self.word})
        self.aim["victim"] = self.victim.pid
        for family, address in (
            (socket.AF_INET, ("127.0.0.1", 0)),
            (socket.AF_UNIX, f"\0{self.aim['abstract']}"),
            (socket.AF_UNIX, str(self.aim["socket"])),
        ):
            one = socket.socket(family)
            one.bind(address)
            one.listen(16)
            self._sockets.append(one)
        self.aim["port"] = self._sockets[0].getsockname()[1]
        self._shm.write_text(self.word)
        self._segment = _libc.shmget(self.aim["segment"], 4096, _IPC_CREATE | 0o666)
        word = self.word.encode()
        call_keys("keyctl", _JOIN_SESSION, None)
        call_keys("add_key", b"user", str(self.aim["key"]).encode(), word, len(word), _SESSION_KEYRING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.victim.kill()
        self.victim.wait()
        for one in self._sockets:
            one.close()
        for left in self._shm.parent.glob(f"{self._shm.name}*"):
            left.unlink()
        _libc.shmctl(self._segment, _IPC_REMOVE, None)

    def harm(self) -> list[str]:
        """What was done to the host."""
        found = []
        if self.victim.poll() is not None:
            found.append("a process of the host was killed")
        if self.secret.read_text() != self.word:
            found.append("a file of the host was changed")
        if (self.secret.parent / "planted").exists():
            found.append("a file was made on the host")
        if (self._given / "id").read_bytes() != self._program:
            found.append("a file that was given read-only was changed")
        return found

    def running(self) -> list[int]:
        """Processes of the host that carry the mark."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_marked(pid)]

    def outlived(self) -> bool:
        """Whether something marked still runs, after the moment that its end may take."""
        for _ in range(100):
            if not self.running():
                return False
            time.sleep(0.02)
        return True

    def _is_marked(self, pid: int) -> bool:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return False
        return words[:2] == [b"sleep", self.mark.encode()]
