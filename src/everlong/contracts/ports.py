"""What rooms ask of each other. Each port has an in-memory or plain implementation that ships; one contract test runs all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from everlong.contracts.records import (
    EngineMismatch,
    EngineStatus,
    GenerateReply,
    GenerateRequest,
    Limits,
    MemberStatus,
    PublishedVersion,
    Reconciled,
    Record,
    ScoredColumns,
    ScoreRequest,
    TrainBatch,
    TrainerStatus,
    TrainReport,
)


class Engine(Protocol):
    """Token ids in, token ids out."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Sample one turn.

        Raises ValueError for a request that can never run (empty or too long prompt, ids outside the vocabulary),
        StaleWeights when the engine holds an older version than the request needs, EngineError when the engine failed.
        An aborted request answers with what it sampled and `FinishReason.ABORT`. Safe to retry: the same request gives
        the same tokens while the weights are the same.
        """
        ...

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        """Stop these requests soon; unknown ids are ignored."""
        ...

    async def update(self, policy_version: int) -> EngineStatus:
        """Pull a published version from the object store and apply it between two decoding steps.

        Raises StaleWeights when no chain of deltas leads there; then the engine keeps what it had. Idempotent.
        """
        ...

    async def status(self) -> EngineStatus: ...

    async def close(self) -> None: ...


class PooledEngine(Engine, Protocol):
    """Several engines behind one port. Their tokens say which of them sampled each (`TokenColumns.engines`)."""

    async def judge(self, mismatch: tuple[EngineMismatch, ...]) -> tuple[MemberStatus, ...]:
        """Take note of what training measured; says how every engine stands after that. One that is too far from the trainer
        is quarantined. Where that leaves none, requests wait until the pool is closed."""
        ...


class Trainer(Protocol):
    """Batches in, new weights out. Nothing is durable before `save`, nothing is visible to engines before `publish`."""

    async def train(self, batch: TrainBatch) -> TrainReport:
        """Do the batch's optimiser steps. Raises ValueError when `batch.batch` is not the next one."""
        ...

    async def score(self, request: ScoreRequest) -> ScoredColumns:
        """Logprobs under the weights as they are, with the same processing (temperature, kept sets) as at sampling; the critic's
        values of the states before and behind each token. A column that was not asked for, or cannot be had, is None."""
        ...

    async def save(self) -> TrainerStatus:
        """Make everything that training needs durable, atomically; a checkpoint of the same batch is left as it is."""
        ...

    async def restore(self, num_batches: int | None = None) -> TrainerStatus:
        """Take up the newest checkpoint with at most `num_batches` batches (None: the newest). Without one: start anew."""
        ...

    async def reconcile(self) -> Reconciled:
        """Compare the weights with the version that is published under their number, and take that one up where they differ: it is
        what engines sampled with. Moments stay. Raises ValueError where it cannot be taken up, or may not differ."""
        ...

    async def publish(self) -> PublishedVersion:
        """Put the current policy version into the object store as delta or anchor; the same version twice is one."""
        ...

    async def export(self, folder: str) -> None:
        """Write the policy as a checkpoint that other programs load. Raises FileExistsError where the folder is there."""
        ...

    async def close(self) -> None: ...


class Command(Record, frozen=True, kw_only=True):
    """One command in a sandbox. Standard input is closed."""

    argv: tuple[str, ...]
    timeout_s: float
    cwd: str | None = None
    """None is the sandbox's workdir."""
    env: dict[str, str] = {}
    keep_processes: bool = False
    """What it left in the background lives on after a clean end, until the sandbox closes. Needs `Capabilities.processes`."""


class ExecResult(Record, frozen=True, kw_only=True):
    exit_code: int
    """As the shell reports it: 124 after the time limit, 128 + n after signal n."""
    output: bytes
    """stdout and stderr as they came, cut at the limit; what came before a deadline is kept."""
    timed_out: bool = False
    truncated: bool = False
    memory_exceeded: bool = False
    elapsed_s: float = 0.0


class Mount(Record, frozen=True, kw_only=True):
    """A folder of the host, seen read-only inside."""

    source: str
    target: str


class SandboxSpec(Record, frozen=True, kw_only=True):
    """What a sandbox starts from."""

    name: str
    workdir: str = "/app"
    files: str | None = None
    """A folder of the host whose content is copied into the workdir; None for an empty one."""
    env: dict[str, str] = {}
    mounts: tuple[Mount, ...] = ()
    writable: tuple[str, ...] = ()
    """Further folders inside that may be written, empty at the start (for example /logs/verifier)."""
    limits: Limits = msgspec.field(default_factory=Limits)
    network: bool = False
    ttl_s: float | None = None
    """The sandbox is closed this long after its creation, whatever happens."""


class Capabilities(Record, frozen=True, kw_only=True):
    """What a backend really gives on this machine, found by doing it once."""

    isolation: str
    """"user-kernel" (a kernel of its own above the host's), "namespaces" or "none"."""
    network_off: bool
    memory_limit: bool
    process_limit: bool
    real_paths: bool = True
    """Whether commands see the sandbox's folders at their paths; else its root is in `EVERLONG_ROOT`."""
    snapshots: str = "copies"
    """"layers" (sealed and stacked, at a cost that does not depend on size), "images" (the whole sandbox) or "copies"."""
    processes: bool = False
    """Whether processes can outlive their command, and snapshots hold them and their memory; else snapshots are of files."""
    pause_to_disk: bool = False
    """Whether a paused sandbox can give all its memory back."""
    incremental: bool = False
    """Whether a snapshot with a parent stores only what changed since."""
    reason: str = ""
    """Why less than everything is to be had."""


PauseTo = Literal["stopped", "disk"]


class Snapshot(Record, frozen=True, kw_only=True):
    """A sandbox as it was between two commands; its backend keeps the content until `drop` or its own end.

    Example: Snapshot(id="3", sandbox="g4/2.0", parent="2", stored_bytes=1_600_000)
    """

    id: str
    sandbox: str
    """The name of the one it was taken of."""
    parent: str | None = None
    """What it is an increment to."""
    stored_bytes: int | None = None
    """What it added on disk; None where counting would cost more than taking it."""


class Sandbox(Protocol):
    """Where an agent's commands run. While it is paused every call but `resume` and `close` raises SandboxError."""

    @property
    def name(self) -> str: ...

    async def exec(self, command: Command) -> ExecResult:
        """Run to the end or the time limit; then everything the command started is dead. Raises SandboxError."""
        ...

    async def read(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        """Raises FileNotFoundError; a path that leads out of the sandbox raises SandboxError."""
        ...

    async def write(self, path: str, data: bytes) -> None: ...

    async def fork(self, spec: SandboxSpec) -> Sandbox:
        """A new sandbox with a copy of this one's workdir and none of its processes; `spec.files` must be None.

        For grading. A fork that goes on as the original would is `snapshot`, then `SandboxBackend.restore` under new names.
        """
        ...

    async def pause(self, to: PauseTo = "stopped") -> None:
        """stopped: a running command stands still, its time limit too, and takes no CPU. disk: nothing of it is in memory.

        Raises ValueError where the backend cannot (`Capabilities.pause_to_disk`); pausing again is nothing.
        """
        ...

    async def resume(self) -> None:
        """Go on as if nothing had been. Raises SandboxError where the state is lost; resuming what runs is nothing."""
        ...

    async def snapshot(self, parent: Snapshot | None = None) -> Snapshot:
        """Keep what it is now, once the running command has ended; it goes on. `parent`: an earlier one to store little beside."""
        ...

    async def rollback(self, snapshot: Snapshot) -> None:
        """Be again what the snapshot holds, under the same name; a running command is waited for. Any number of times."""
        ...

    async def close(self) -> None:
        """Kill what runs and remove what was stored. Idempotent."""
        ...


class SandboxBackend(Protocol):
    @property
    def scratch(self) -> Path | None:
        """Where files are put together for a sandbox; what a killed process leaves there goes with its sandboxes. None is the
        system's temporary folder."""
        ...

    async def probe(self) -> Capabilities: ...

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Raises SandboxError when the sandbox cannot start."""
        ...

    async def restore(self, snapshot: Snapshot, names: tuple[str, ...]) -> Sequence[Sandbox]:
        """A new sandbox per name that goes on from the snapshot: several are a fork. Their ttl starts anew.

        All or none. Raises ValueError for a snapshot that is not of this backend or was dropped, SandboxError.
        """
        ...

    async def drop(self, snapshot: Snapshot) -> None:
        """Remove the snapshot's content as far as no sandbox and no other snapshot needs it. Idempotent."""
        ...

    async def close(self) -> None:
        """Close every sandbox that is left, and sweep what a killed run left behind."""
        ...


class ObjectStore(Protocol):
    """Bytes under keys; a folder, memory, S3, GCS or Azure. Keys are slash-separated; one object appears whole or not at all."""

    def create(self, key: str, data: bytes) -> None:
        """Raises AlreadyExists when the key is taken; of two writers exactly one wins."""
        ...

    def put(self, key: str, data: bytes) -> None: ...

    def get(self, key: str) -> bytes:
        """Raises NotFound."""
        ...

    def list(self, prefix: str) -> list[str]:  # ty: ignore[invalid-type-form]  # the method hides the type
        """Every key below the prefix, sorted."""
        ...

    def delete(self, key: str) -> None:
        """A key that is not there is no error."""
        ...


class MetricSink(Protocol):
    """Where measured points go. A point is never dropped for being older than another."""

    def log(self, axis: str, step: int, values: dict[str, float]) -> None:
        """`axis` names what `step` counts ("batch", "eval", "policy_version"): each axis has its own order."""
        ...

    def close(self) -> None: ...
