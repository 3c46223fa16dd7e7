"""Kills processes that use sandboxes with SIGKILL at random moments, and looks what is left once the next one has started.

    python -m tests.campaign.sandboxes --kills 100 --seed 0

Each kind of sandbox in turn (namespaces, none, gVisor). The process creates sandboxes, runs commands that leave children, takes
snapshots, restores, rolls back, forks and closes, two things at a time. Every third kill comes at a moment drawn over its start;
the others up to half a second after a thing drawn from those that it begins. Then another process opens the same root:

- no process of the killed one is left, and none has one of its mounts;
- its folder is gone, and its control groups;
- another manager of the same root, its sandboxes and a command in one of them, and processes that only look like ours, are as
  they were.

Kills that are done are noted in the work folder: the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from tests.campaign.processes import left_over
from tests.campaign.sandbox_manager import Kind, open_backend
from tests.evidence import ROOT, keep_to_one_code, write_evidence

from everlong.contracts.errors import SandboxError
from everlong.contracts.records import Record
from everlong.environments.sandboxes.memory_group import own_group
from everlong.environments.sandboxes.registry import MARKER, scratch_folder

KINDS: tuple[Kind, ...] = ("namespaces", "none", "gvisor")
PATHS = ("src/everlong/environments/sandboxes", "tests/campaign/sandboxes.py", "tests/campaign/sandbox_manager.py")
BY_CLOCK_EVERY = 3
MAX_THINGS = 25
AFTER_THING_S = 0.5
DEATH_S = 60.0
"""A process that lost its manager has this long to end."""
START_S = 300.0


class KilledManager(Record, frozen=True, kw_only=True):
    kind: str
    index: int
    moment_s: float
    num_things: int
    """That it had begun."""
    last_thing: str
    """"nothing" before the first."""
    num_folders: int
    """That it left for the next one: 0 or 1."""
    failures: tuple[str, ...]
    """What did not hold; nothing is a success."""
    elapsed_s: float


@dataclass(frozen=True)
class Campaign:
    """Kills in roots of their own below `work`."""

    work: Path
    seed: int

    def run(self, num_kills: int, kinds: Sequence[Kind]) -> Iterator[KilledManager]:
        """Kinds in turn; those of an earlier process are read back."""
        done = {(one.kind, one.index): one for one in self._noted()}
        with contextlib.ExitStack() as stack:
            bystanders: dict[Kind, Bystanders] = {}
            for number in range(num_kills):
                kind, index = kinds[number % len(kinds)], number // len(kinds)
                one = done.get((kind, index))
                if one is None:
                    if kind not in bystanders:
                        bystanders[kind] = stack.enter_context(Bystanders.beside(kind, self._root(kind)))
                    one = self.kill(kind, index, bystanders[kind])
                    with self._notes.open("ab") as notes:
                        notes.write(msgspec.json.encode(one) + b"\n")
                yield one

    def kill(self, kind: Kind, index: int, bystanders: Bystanders) -> KilledManager:
        began = time.monotonic()
        root = self._root(kind)
        log = self.work / f"{kind}-{index}.log"
        before = set(root.iterdir())
        moment_s = self._start_and_kill(kind, index, root, log)
        things = log.read_text().splitlines()
        dead = set(root.iterdir()) - before
        failures = tuple(_look_after(kind, root, before, dead) + bystanders.harm())
        return KilledManager(
            kind=kind,
            index=index,
            moment_s=round(moment_s, 3),
            num_things=len(things),
            last_thing=things[-1] if things else "nothing",
            num_folders=len(dead),
            failures=failures,
            elapsed_s=round(time.monotonic() - began, 1),
        )

    def _start_and_kill(self, kind: Kind, index: int, root: Path, log: Path) -> float:
        draws = np.random.default_rng([self.seed, KINDS.index(kind), index])
        by_clock = index % BY_CLOCK_EVERY == BY_CLOCK_EVERY - 1
        num_things = 0 if by_clock else int(draws.integers(1, MAX_THINGS))
        delay_s = float(draws.uniform(0.0, self._start_s(log) if by_clock else AFTER_THING_S))
        began = time.monotonic()
        with log.open("wb") as said, _manager(kind, root, str(draws.integers(1 << 30)), said.fileno()) as manager:
            while manager.poll() is None and len(log.read_bytes().splitlines()) < num_things:
                time.sleep(0.01)
                if time.monotonic() - began > START_S:
                    break
            time.sleep(delay_s)
            if manager.poll() is not None:
                raise RuntimeError(f"the {kind} manager ended by itself: see {log}")
            manager.kill()
            manager.wait()
        return time.monotonic() - began

    def _start_s(self, log: Path) -> float:
        """How long a start takes, measured once."""
        known = log.with_name("start_s")
        if not known.exists():
            began = time.monotonic()
            subprocess.run([sys.executable, "-c", "import tests.campaign.sandbox_manager"], check=True, cwd=ROOT)
            known.write_text(str(2 * (time.monotonic() - began)))
        return float(known.read_text())

    def _root(self, kind: Kind) -> Path:
        root = self.work / f"{kind}-sandboxes"
        root.mkdir(exist_ok=True)
        return root

    @property
    def _notes(self) -> Path:
        return self.work / "kills.jsonl"

    def _noted(self) -> list[KilledManager]:
        lines = self._notes.read_bytes().splitlines() if self._notes.exists() else []
        return [msgspec.json.decode(line, type=KilledManager) for line in lines]


class Bystanders:
    """Who must not be touched: a manager of the same root with its sandboxes, and processes that look like a sandbox's."""

    def __init__(self, manager: subprocess.Popen[bytes], others: list[subprocess.Popen[bytes]], root: Path) -> None:
        self._manager, self._others = manager, others
        [self._folder] = [path for path in root.iterdir() if path.name.startswith("run-")]
        self._family = _family(manager.pid)

    @classmethod
    @contextlib.contextmanager
    def beside(cls, kind: Kind, root: Path) -> Generator[Bystanders]:
        mark = {**os.environ, MARKER: f"{root}/run-else/s-a/"}
        with contextlib.ExitStack() as stack:
            manager = stack.enter_context(_manager(kind, root, "stand", subprocess.PIPE, stdin=subprocess.PIPE))
            assert manager.stdout
            while (line := manager.stdout.readline()) != b"standing\n":
                if not line:
                    raise SandboxError(f"the {kind} bystander ended with {manager.wait()}")
            others = [subprocess.Popen(["sleep", "100000"], env=env) for env in (mark, None)]
            try:
                yield cls(manager, others, root)
            finally:
                for other in others:
                    other.kill()
                    other.wait()

    def harm(self) -> list[str]:
        assert self._manager.stdin and self._manager.stdout
        self._manager.stdin.write(b"look\n")
        self._manager.stdin.flush()
        said = self._manager.stdout.readline().decode().strip()
        found = [] if said == "fine" else [f"the other manager says {said!r}"]
        found += [
            "a process that only looks like ours was killed" for other in self._others if other.poll() is not None
        ]
        if not (self._folder / "lock").exists():
            found.append("the folder of the other manager was touched")
        if not self._family <= _family(self._manager.pid):
            found.append("a process of the other manager was killed")
        return found


@contextlib.contextmanager
def _manager(
    kind: Kind, root: Path, seed: str, stdout: int, stdin: int = subprocess.DEVNULL
) -> Generator[subprocess.Popen[bytes]]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    argv = [sys.executable, "-m", "tests.campaign.sandbox_manager", kind, str(root), seed]
    env = {**os.environ, **threads, "PYTHONPATH": path}
    with subprocess.Popen(argv, cwd=ROOT, env=env, stdin=stdin, stdout=stdout) as manager:
        try:
            yield manager
        finally:
            if manager.stdin is not None:
                manager.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    manager.wait(DEATH_S)
            manager.kill()


def _look_after(kind: Kind, root: Path, before: set[Path], dead: set[Path]) -> list[str]:
    """Start the next one, and say what is left of the dead one then."""

    async def start() -> list[Path]:
        backend = open_backend(kind, root)
        swept = backend.swept
        await backend.close()
        return swept

    swept = asyncio.run(start())
    found = [f"it removed {path}" for path in set(swept) - dead]
    found += [f"{path} is left" for path in set(root.iterdir()) - before]
    found += [f"{path} is gone" for path in before - set(root.iterdir())]
    for folder in dead:
        found += left_over(folder, folders=False, patience_s=DEATH_S)
        groups = own_group()
        if groups is not None:
            found += [f"group {path.name} is left" for path in groups.glob(f"everlong-{folder.name}-*")]
    return found


def _family(top: int) -> set[tuple[int, bytes]]:
    """Everything below a process, with when it started."""
    found: set[tuple[int, bytes]] = set()
    stack = [top]
    while stack:
        pid = stack.pop()
        with contextlib.suppress(OSError):
            found.add((pid, Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[19]))
            for thread in os.listdir(f"/proc/{pid}/task"):
                stack += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def figures_of(runs: list[KilledManager]) -> dict[str, object]:
    return {
        "kills": len(runs),
        "kills_by_kind": dict(Counter(run.kind for run in runs)),
        "kills_with_something_left_or_touched": sum(bool(run.failures) for run in runs),
        "kills_that_left_a_folder_for_the_next_start": sum(run.num_folders for run in runs),
        "killed_after": dict(sorted(Counter(run.last_thing for run in runs).items())),
        "things_begun_at_the_kill": sorted(run.num_things for run in runs),
        "moments_s": sorted(round(run.moment_s, 1) for run in runs),
        "failures": [f"{run.kind} {run.index}: {failure}" for run in runs for failure in run.failures],
    }


def usable_kinds() -> tuple[Kind, ...]:
    """Says which one this machine refuses."""
    usable: list[Kind] = []
    for kind in KINDS:
        try:
            asyncio.run(_probe(kind))
            usable.append(kind)
        except SandboxError as error:
            print(f"{kind} is left out: {error}", file=sys.stderr)
    return tuple(usable)


async def _probe(kind: Kind) -> None:
    with scratch_folder("campaign") as folder:
        backend = open_backend(kind, folder / "sandboxes")
        try:
            await backend.probe()
        finally:
            await backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.campaign.sandboxes", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--kills", type=int, default=100, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--work", type=Path, help="folder that this campaign has to itself; goes on with what is there")
    parser.add_argument("--evidence", type=Path, default=ROOT / "docs" / "evidence" / "sandboxes-kill.json")
    args = parser.parse_args()
    if args.kills < 1:
        parser.error(f"--kills must be at least 1, got {args.kills}")
    work = (args.work or ROOT / "runs" / f"kill-sandboxes-{args.seed}").absolute()
    keep_to_one_code(work, PATHS)
    runs = []
    for run in Campaign(work, args.seed).run(args.kills, usable_kinds()):
        runs.append(run)
        print(
            f"{run.kind:11}{run.index:3}  killed at {run.moment_s:6.2f} s after {run.num_things:3} things ({run.last_thing}): "
            f"{'; '.join(run.failures) or 'nothing left, nobody touched'}",
            flush=True,
        )
    figures = figures_of(runs)
    write_evidence(
        args.evidence,
        name="sandboxes-kill",
        command=f"python -m tests.campaign.sandboxes --kills {args.kills} --seed {args.seed}",
        seed=args.seed,
        figures=figures,
        paths=PATHS,
    )
    sys.exit(1 if figures["kills_with_something_left_or_touched"] else 0)


if __name__ == "__main__":
    main()
