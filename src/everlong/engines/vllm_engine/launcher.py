"""Runs a server that does not outlive whoever started us, however that ends; standard library only.

    python launcher.py FOLDER COMMAND...

Our standard input is a pipe whose other end the owner holds and never writes to. When it closes, or when the server's
first process ends, every process of the server is killed and FOLDER, which holds its socket, is removed.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys


def main(folder: str, command: list[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    owner, ended = sys.stdin.fileno(), os.pidfd_open(child.pid)
    ready, _, _ = select.select([owner, ended], [], [])
    with contextlib.suppress(ProcessLookupError):  # the group of a server that died may be empty
        os.killpg(child.pid, signal.SIGKILL)
    code = child.wait()
    shutil.rmtree(folder, ignore_errors=True)
    print("launcher: " + ("the owner is gone" if owner in ready else f"the server ended with code {code}"), flush=True)
    return 0 if owner in ready else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
