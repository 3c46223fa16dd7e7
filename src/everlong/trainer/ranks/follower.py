"""Main of every rank but the first: builds the trainer that the first one has, and does what it is told until nobody tells.

python -m everlong.trainer.ranks.follower --factory package.module:function --config FILE --rank R --size N --meeting-place FILE
"""

from __future__ import annotations

import argparse
import os
import pickle
import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import Any, Protocol

from everlong.contracts.import_path import load_named

READY = b"ready\n"
LOST_A_RANK = 75
"""Exit code of a rank that ends because another one did."""


class Following(Protocol):
    """A trainer that does what the first rank's does."""

    def follow(self, name: str, argument: Any) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(prog="everlong-rank", description=__doc__)
    for name in ("factory", "config", "meeting-place"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("rank", "size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    to_leader = os.dup(1)
    os.dup2(2, 1)  # what somebody prints goes to the log
    commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(commands,), daemon=True).start()
    try:
        _work(commands, args, to_leader)
    except BaseException as error:
        _leave(error, to_leader)


def _work(commands: queue.SimpleQueue[tuple[str, Any]], args: argparse.Namespace, to_leader: int) -> None:
    from everlong.trainer.ranks.group import RankGroup

    group = RankGroup(args.rank, args.size, Path(args.meeting_place))
    trainer: Following = load_named(args.factory)(args.config, group)
    os.write(to_leader, READY)
    group.join()
    while True:
        trainer.follow(*commands.get())


def _listen(commands: queue.SimpleQueue[tuple[str, Any]]) -> None:
    """Put what is told into the queue; when the leader is gone, leave in the middle of whatever is computed."""
    while True:
        try:
            commands.put(pickle.load(sys.stdin.buffer))
        except (EOFError, pickle.UnpicklingError):
            os._exit(0)


def _leave(error: BaseException, to_leader: int) -> None:
    """Say why, to the log and to the leader, and end although threads compute."""
    from everlong.trainer.ranks.group import RankLost

    if isinstance(error, RankLost):
        os._exit(LOST_A_RANK)
    traceback.print_exception(error)
    sys.stderr.flush()
    os.write(to_leader, f"{type(error).__name__}: {error}\n".encode())
    os._exit(1)


if __name__ == "__main__":
    main()
