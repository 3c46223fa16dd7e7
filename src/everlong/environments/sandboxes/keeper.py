"""The process tree that holds every gVisor sandbox of a backend, so that none outlives it.

`runsc` leaves daemons behind. Here all of them live in one pid namespace whose first process waits for the end of its standard
input: when the manager ends, however it ends, that comes, and the kernel kills whatever is in the namespace. An ordinary user
gets the namespace inside a user namespace of its own. `runsc` itself is started from outside, into the namespaces, by `nsenter`.
"""

from __future__ import annotations

import asyncio
import os
import select
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everlong.contracts.errors import SandboxError

# Ignored, the deaths of orphans are noticed by the kernel itself: nobody has to wait for them.
_INIT = (
    "import os, signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.chdir('/'); os.write(1, b'r'); os.read(0, 1)"
)
_START_S = 20.0
_STOP_S = 10.0
_SAID_CHARS = 600


@dataclass(frozen=True, slots=True)
class Runsc:
    """Where the program is, and the folder of its state."""

    program: Path
    state: Path

    def argv(self, *words: str) -> tuple[str, ...]:
        flags = ("--platform=systrap", "--network=none", "--ignore-cgroups", "--overlay2=root:memory")
        return (str(self.program), f"--root={self.state}", *flags, *words)


class Keeper:
    """Open it with `start`. Everything that runs below it dies with `close`, or with this process."""

    def __init__(self, runsc: Runsc) -> None:
        self._runsc = runsc
        self._process: subprocess.Popen[bytes] | None = None
        self._enter: tuple[str, ...] = ()

    async def start(self) -> None:
        """Raises SandboxError where the machine refuses the namespaces."""
        for program in ("unshare", "nsenter"):
            if shutil.which(program) is None:
                raise SandboxError(
                    f"gVisor sandboxes need the program {program} (util-linux), which is not on the PATH"
                )
        user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
        argv = ("unshare", *user, "--mount", "--pid", "--ipc", "--fork", "--kill-child=SIGKILL", "--mount-proc")
        self._process = await asyncio.to_thread(_open_namespace, (*argv, "/usr/bin/python3", "-I", "-S", "-c", _INIT))
        process = self._process
        init = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
        own_user = ("--user", "--preserve-credentials") if user else ()
        self._enter = ("nsenter", f"--target={init}", *own_user, "--mount", "--pid", "--ipc")

    def argv(self, *words: str, group: Path | None = None) -> tuple[str, ...]:
        """What runs `runsc WORDS` in the namespaces, as a member of a memory group."""
        join = ("sh", "-c", 'echo $$ > "$0"; exec "$@"', str(group / "cgroup.procs")) if group is not None else ()
        return (*self._enter, *join, *self._runsc.argv(*words))

    async def call(
        self, *words: str, group: Path | None = None, data: bytes | None = None, timeout_s: float = 60.0
    ) -> bytes:
        """What `runsc WORDS` says. Raises SandboxError where it fails or says nothing for too long."""
        code, output = await self.run(self.argv(*words, group=group), data, timeout_s)
        if code:
            raise SandboxError(
                f"runsc {words[0]} ended with {code}: {output.decode(errors='replace').strip()[-_SAID_CHARS:]}"
            )
        return output

    async def run(self, argv: Sequence[str], data: bytes | None = None, timeout_s: float = 60.0) -> tuple[int, bytes]:
        """Exit code and output. Raises SandboxError at the time limit."""
        # The daemons that runsc leaves hold its output open for as long as they live: a pipe would never end.
        with open(os.memfd_create("runsc", os.MFD_CLOEXEC), "r+b", buffering=0) as output:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL if data is None else asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd="/",
            )
            try:
                await asyncio.wait_for(process.communicate(data), timeout_s)
            except TimeoutError:
                raise SandboxError(f"{' '.join(argv[-4:])} did not end within {timeout_s:g} s") from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await asyncio.shield(process.wait())
            output.seek(0)
            return process.returncode or 0, output.read()

    async def close(self) -> None:
        """Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_close_namespace, process)


def _open_namespace(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    """Not asyncio's: it must live and die with this process, whichever event loop runs in it."""
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout and process.stderr
    ready, _, _ = select.select([process.stdout], [], [], _START_S)
    if ready and process.stdout.read(1) == b"r":
        return process
    process.kill()
    trouble = process.communicate()[1].decode(errors="replace").strip()
    raise SandboxError(f"no namespaces for gVisor sandboxes: {trouble[-_SAID_CHARS:] or 'unshare said nothing'}")


def _close_namespace(process: subprocess.Popen[bytes]) -> None:
    try:
        process.communicate(timeout=_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
