"""The `everlong` command: Ctrl-C ends it in one line, also while it still loads what it needs."""

from __future__ import annotations

import os
import signal
import sys

STOPPED = 130
"""Exit code after Ctrl-C or SIGTERM, as a shell reports it."""


def main() -> None:
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a job in the background ignores it, and goes on doing so
        # not an exception: it would be lost wherever a library that is being imported catches everything
        signal.signal(signal.SIGINT, _leave)
    from everlong.cli.main import main as run_command

    signal.signal(signal.SIGINT, before)
    run_command()


def _leave(number: int, frame: object) -> None:
    """Nothing exists yet that would have to be closed."""
    sys.stderr.write("stopped\n")
    sys.stderr.flush()
    os._exit(STOPPED)
