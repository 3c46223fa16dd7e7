"""The first rank: starts the others as child processes, tells them what all do together, and notices when one is gone.

A follower hears commands on its standard input, as pickles between processes of one program, and ends by itself when that closes: no
rank outlives its leader. Where a rank ends in the middle, the exchange breaks in all others at once, the leader ends them, and
the step is not made.
"""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from everlong.contracts.errors import WorkerDied
from everlong.trainer.ranks.follower import LOST_A_RANK, READY
from everlong.trainer.ranks.group import RankGroup, RankLost

LOOKS, LOOK_S = 200, 0.05
"""For a rank to say why it ends, after the others have noticed. Looks are counted, and no clock: a machine may sleep meanwhile."""


class Follower:
    """A child process that is one rank."""

    def __init__(self, factory: str, config: str, rank: int, size: int, meeting_place: Path) -> None:
        self.rank = rank
        argv = [sys.executable, "-m", "everlong.trainer.ranks.follower"]
        options = {"factory": factory, "config": config, "rank": rank, "size": size, "meeting-place": meeting_place}
        for name, value in options.items():
            argv += [f"--{name}", str(value)]
        # a session of its own: Ctrl-C in a terminal is for the control process to answer
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)

    def wait_until_ready(self) -> None:
        """Raises WorkerDied where it ended first."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line != READY:
            raise WorkerDied(self.ending("while it was started", line))

    def tell(self, name: str, argument: object) -> None:
        assert self.process.stdin is not None
        pickle.dump((name, argument), self.process.stdin, protocol=pickle.HIGHEST_PROTOCOL)
        self.process.stdin.flush()

    def ending(self, when: str, heard: bytes = b"") -> str:
        """How it ended, in words, with what it said of it; `heard` was read already."""
        assert self.process.stdout is not None
        code = self.process.wait()
        said = (heard + self.process.stdout.read()).decode(errors="replace").strip()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"rank {self.rank} of the trainer (pid {self.process.pid}) {how} {when}" + (f": {said}" if said else "")

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:  # what was still to be written has no reader
                    continue


class Leader(RankGroup):
    """Rank 0 and its followers."""

    def __init__(self, followers: Sequence[Follower], meeting_place: Path) -> None:
        self._followers, self._broken = followers, ""
        super().__init__(0, 1 + len(followers), meeting_place)

    def join(self) -> None:
        """Raises WorkerDied where a follower cannot start."""
        for follower in self._followers:
            follower.wait_until_ready()
        super().join()
        shutil.rmtree(self._meeting_place.parent)

    @contextmanager
    def together(self, name: str, argument: object) -> Generator[None]:
        if self._broken:
            raise WorkerDied(self._broken)
        try:
            for follower in self._followers:
                follower.tell(name, argument)
            yield
        except (RankLost, BrokenPipeError) as error:
            self._broken = f"{self._culprit(f'during {name}') or error}; what was under way was not done: `everlong resume` goes on"
            self.close()
            raise WorkerDied(self._broken) from error
        except BaseException as error:
            # the others wait in an exchange that never comes
            self._broken = f"the trainer's ranks were ended when {name} failed ({error}): `everlong resume` goes on"
            self.close()
            raise

    def close(self) -> None:
        for follower in self._followers:
            follower.end()
        shutil.rmtree(self._meeting_place.parent, ignore_errors=True)
        super().close()

    def _culprit(self, when: str) -> str | None:
        """How the rank ended that was the first to go; the others only lost it."""
        for _ in range(LOOKS):
            codes = [follower.process.poll() for follower in self._followers]
            for follower, code in zip(self._followers, codes, strict=True):
                if code is not None and code != LOST_A_RANK:
                    return follower.ending(when)
            time.sleep(LOOK_S)
        return None


def start_ranks(factory: str, config: str, size: int) -> Leader:
    """`factory` names what builds a follower's trainer from the path of the config and its `RankGroup`. They are built while the leader
    builds its own; `join` waits for them."""
    place = Path(tempfile.mkdtemp(prefix="everlong-ranks-")) / "meeting"
    return Leader([Follower(factory, config, rank, size, place) for rank in range(1, size)], place)
