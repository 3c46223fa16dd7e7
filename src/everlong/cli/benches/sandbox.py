"""Sandboxes: what start, command, pause, snapshot, restore and rollback cost, and how many share a machine's memory.

A sandbox holds 20 or 200 MB that do not compress: in a process where the backend keeps processes, else in a file. Reference:
what AgentENV publishes for its Firecracker microVMs (Kimi K3 report: checkpoint 133 ms, resume 49 ms, over-commit 6.5 times);
where it publishes nothing a row stands alone, with ratio 1. Backends that this machine lacks are skipped aloud.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from everlong.cli.bench import Row
from everlong.contracts.errors import SandboxError
from everlong.contracts.ports import Command, Sandbox, SandboxBackend, SandboxSpec
from everlong.environments.sandboxes.gvisor import GvisorBackend
from everlong.environments.sandboxes.local import LocalBackend
from everlong.environments.sandboxes.pool import PooledBackend

T = TypeVar("T")

REPEATS = 20
PUBLISHED_MS = {"checkpoint": 133.0, "snapshot": 133.0, "resume_disk": 49.0}
PUBLISHED_RATIO = 6.5
_HOLD = "import os, time; held = os.urandom({mb} << 20); open('ready', 'w').close(); time.sleep(1e6)"

NUM_SANDBOXES, HELD_MB, MAX_RESIDENT = 12, 100, 2
CYCLE_S, BUSY_SHARE, NUM_CYCLES = 60.0, 0.02, 2


def measure() -> list[Row]:
    rows: list[Row] = []
    for kind, size_mb in (("local", 20), ("local", 200), ("gvisor", 20), ("gvisor", 200)):
        rows += _skipped_aloud(f"{kind}-{size_mb}", lambda k=kind, mb=size_mb: _verbs(k, mb))
    return rows + _skipped_aloud("overcommit", _overcommit)


def _skipped_aloud(case: str, work: Callable[[], Awaitable[list[Row]]]) -> list[Row]:
    async def run() -> list[Row]:
        return await work()

    try:
        return asyncio.run(run())
    except SandboxError as error:
        print(f"{case}: skipped, {error}", file=sys.stderr)
        return []


def _open(kind: str, root: Path) -> SandboxBackend:
    return LocalBackend(root) if kind == "local" else GvisorBackend(root)


async def _verbs(kind: str, size_mb: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="everlong-bench-") as folder:
        backend = _open(kind, Path(folder))
        try:
            stopwatch = Stopwatch()
            for number in range(REPEATS):
                await _one_round(backend, stopwatch, number, size_mb)
        finally:
            await backend.close()
    rows = [_row(f"{kind}-{size_mb}", metric, values) for metric, values in stopwatch.ms.items()]
    return rows + [
        Row(f"{kind}-{size_mb}", metric, "MB", value, "none published", value, 1.0)
        for metric, value in stopwatch.median_mb().items()
    ]


def _row(case: str, metric: str, values: list[float]) -> Row:
    value = statistics.median(values)
    published = PUBLISHED_MS.get(metric)
    if published is None:
        return Row(case, metric, "ms", value, "none published", value, 1.0)
    return Row(case, metric, "ms", value, "AgentENV", published, published / value)


class Stopwatch:
    """Milliseconds per verb, and what snapshots stored."""

    def __init__(self) -> None:
        self.ms: dict[str, list[float]] = {}
        self.mb: dict[str, list[float]] = {}

    async def __call__(self, metric: str, work: Awaitable[T]) -> T:
        started = time.perf_counter()
        result = await work
        self.ms.setdefault(metric, []).append(1000 * (time.perf_counter() - started))
        return result

    def stored(self, metric: str, num_bytes: int | None) -> None:
        if num_bytes is not None:
            self.mb.setdefault(metric, []).append(num_bytes / 1e6)

    def median_mb(self) -> dict[str, float]:
        return {metric: statistics.median(values) for metric, values in self.mb.items()}


async def _one_round(backend: SandboxBackend, timed: Stopwatch, number: int, size_mb: int) -> None:
    capabilities = await backend.probe()
    sandbox = await timed("start", backend.create(SandboxSpec(name=f"bench-{number}")))
    await timed("exec", sandbox.exec(_sh("true")))
    await _hold(sandbox, size_mb, in_process=capabilities.processes)
    await timed("pause", sandbox.pause())
    await timed("resume", sandbox.resume())
    first = await timed("checkpoint" if capabilities.processes else "snapshot", sandbox.snapshot())
    timed.stored("checkpoint_stored", first.stored_bytes)
    await sandbox.exec(_sh("echo changed > small"))
    second = await timed("snapshot_increment", sandbox.snapshot(first))
    timed.stored("increment_stored", second.stored_bytes)
    (fork,) = await timed("fork", backend.restore(first, (f"bench-{number}-fork",)))
    await timed("rollback", sandbox.rollback(first))
    if capabilities.pause_to_disk:
        await timed("pause_disk", sandbox.pause("disk"))
        await timed("resume_disk", sandbox.resume())
    for one in (fork, sandbox):
        await one.close()
    for snapshot in (second, first):
        await backend.drop(snapshot)


def _sh(script: str) -> Command:
    return Command(argv=("sh", "-c", script), timeout_s=60.0)


async def _hold(sandbox: Sandbox, size_mb: int, *, in_process: bool) -> None:
    if not in_process:
        await sandbox.exec(_sh(f"head -c {size_mb}000000 /dev/urandom > held"))
        return
    script = f'python3 -c "{_HOLD.format(mb=size_mb)}" > /dev/null 2>&1 &\nwhile ! [ -e ready ]; do sleep 0.05; done'
    argv = ("sh", "-c", script)
    await sandbox.exec(Command(argv=argv, timeout_s=60.0, keep_processes=True))


async def _overcommit() -> list[Row]:
    """Every sandbox holds `HELD_MB` and waits for most of its cycle; at most `MAX_RESIDENT` hold memory at once."""
    with tempfile.TemporaryDirectory(prefix="everlong-bench-") as folder:
        inner = GvisorBackend(Path(folder))
        pool = PooledBackend(inner, pause_after_s=1.0, max_resident=MAX_RESIDENT)
        try:
            await pool.probe()
            peak = PeakMemory(inner)
            watching = asyncio.create_task(peak.watch())
            try:
                latencies = await asyncio.gather(*(_episode(pool, number) for number in range(NUM_SANDBOXES)))
            finally:
                watching.cancel()
        finally:
            await pool.close()
    late_ms = sorted(1000 * one for several in latencies for one in several)
    p95 = late_ms[math.ceil(0.95 * len(late_ms)) - 1]
    ratio = NUM_SANDBOXES * peak.alone_mb / peak.mb
    return [
        Row("overcommit", "ratio", "x", ratio, "AgentENV", PUBLISHED_RATIO, ratio / PUBLISHED_RATIO),
        Row("overcommit", "added_latency_p95", "ms", p95, "goal", 1000.0, 1000.0 / p95),
        Row("overcommit", "peak_memory", "MB", peak.mb, "all running", NUM_SANDBOXES * peak.alone_mb, ratio),
    ]


async def _episode(pool: PooledBackend, number: int) -> list[float]:
    """Seconds that each command took beyond its own work."""
    rng = random.Random(number)
    sandbox = await pool.create(SandboxSpec(name=f"load-{number}"))
    await _hold(sandbox, HELD_MB, in_process=True)
    late_s = []
    for _ in range(NUM_CYCLES):
        await asyncio.sleep(rng.expovariate(1 / (CYCLE_S * (1 - BUSY_SHARE))))
        started = time.perf_counter()
        result = await sandbox.exec(_sh(f"sleep {CYCLE_S * BUSY_SHARE}"))
        late_s.append(time.perf_counter() - started - result.elapsed_s)
    await sandbox.close()
    return late_s


class PeakMemory:
    """Memory of the sandboxes of a backend, sampled; the most is kept.

    Where they have memory control groups: what these are charged with, the page cache of written snapshots included. Else the
    memory of their processes, each page divided among those who map it.
    """

    def __init__(self, backend: GvisorBackend) -> None:
        self._folder = backend.claim.folder
        self._groups = backend.claim.usable_groups()
        self.mb = 0.0
        self.alone_mb = 0.0
        """The most that one sandbox held, helpers included."""

    async def watch(self) -> None:
        while True:
            sizes = await asyncio.to_thread(self._in_groups if self._groups is not None else self._in_processes)
            self.mb = max(self.mb, sum(sizes))
            self.alone_mb = max([self.alone_mb, *sizes])
            await asyncio.sleep(0.5)

    def _in_groups(self) -> list[float]:
        assert self._groups is not None
        files = self._groups.glob(f"everlong-{self._folder.name}-*/memory.usage_in_bytes")
        return [int(text) / 1e6 for file in files if (text := _text(file))]

    def _in_processes(self) -> list[float]:
        sizes = []
        for entry in Path("/proc").glob("[0-9]*"):
            if str(self._folder) in _text(entry / "cmdline"):
                lines = _text(entry / "smaps_rollup").splitlines()
                sizes.append(sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000)
        return sizes


def _text(file: Path) -> str:
    """Empty where it is gone."""
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""
