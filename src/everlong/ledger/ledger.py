"""The facts on disk: SQLite in WAL mode through apsw, synchronous, one writing process at a time.

The SQLite of many Python builds has a bug that corrupts a WAL when checkpoints race; apsw brings its own, newer one. Never
open a ledger through both.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import apsw

from everlong.contracts.errors import LedgerError
from everlong.contracts.records import Record
from everlong.ledger.facts import Fact, decode_fact, encode_fact
from everlong.ledger.lifecycle import Lifecycle

LEDGER_FILE = "ledger.db"
"""Its name in a run's folder."""

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (seq INTEGER PRIMARY KEY, written_s REAL NOT NULL, fact TEXT NOT NULL) STRICT;
PRAGMA user_version = 1;
"""


Row = tuple[int, float, str]
"""As in the table: number, time of writing, fact as JSON."""


class Entry(Record, frozen=True, kw_only=True):
    """A fact as it lies in the ledger."""

    seq: int
    """From 1 without a gap."""
    written_s: float
    """Seconds since the epoch, by the writer's clock; says nothing about order."""
    fact: Fact


class Ledger:
    """Open with `Ledger.open`. Not for several threads at once: `LedgerWriter` serves asyncio callers."""

    def __init__(self, path: Path, lock: WriterLock) -> None:
        self._path, self._lock = path, lock
        self._connection = _connect(path)
        self._staged: list[Row] = []
        self._failure: BaseException | None = None
        self._lifecycle = Lifecycle()
        self._seq = 0
        for entry in read_entries(self._connection, 0):
            self._lifecycle.apply(entry.fact)
            self._seq = entry.seq

    @classmethod
    def open(cls, path: str | Path) -> Ledger:
        """The ledger of that file, made where there is none; replays what it holds.

        Raises LedgerError while another process has it open for writing, and where its facts contradict each other.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = WriterLock(path)
        try:
            return cls(path, lock)
        except apsw.Error as error:
            lock.release()
            raise LedgerError(f"{path} cannot be opened as a ledger: {error}") from error
        except BaseException:
            lock.release()
            raise

    @property
    def lifecycle(self) -> Lifecycle:
        """What all facts amount to; read it, never apply to it. Staged facts are in it before they are durable."""
        return self._lifecycle

    @property
    def seq(self) -> int:
        """Number of the last fact."""
        return self._seq

    def append(self, *facts: Fact) -> int:
        """Check the facts and make them durable in one transaction, all or none; the number of the last one.

        Raises LedgerError for a fact that contradicts the ledger, and when it cannot be written.
        """
        seq = self.stage(*facts)
        self.commit()
        return seq

    def stage(self, *facts: Fact) -> int:
        """Check the facts and take them up, all or none; the next `commit` makes them durable."""
        self._check_usable()
        texts = [encode_fact(fact) for fact in facts]
        self._lifecycle.apply(*facts)
        now_s = time.time()
        for text in texts:
            self._seq += 1
            self._staged.append((self._seq, now_s, text))
        return self._seq

    def commit(self) -> None:
        """One durable transaction with everything staged. After a failure the ledger takes no more facts."""
        self.write(self.take_staged())

    def take_staged(self) -> list[Row]:
        """What is staged, for one `write` in any thread; until that is done nobody else may write or commit."""
        rows, self._staged = self._staged, []
        return rows

    def write(self, rows: list[Row]) -> None:
        """One durable transaction with these rows; for `commit` in two steps."""
        self._check_usable()
        if not rows:
            return
        try:
            with self._connection:
                self._connection.executemany("INSERT INTO facts VALUES (?, ?, ?)", rows)
        except BaseException as error:
            self._failure = error
            raise LedgerError(
                f"facts {rows[0][0]} to {rows[-1][0]} could not be written ({error}): nothing after fact "
                f"{rows[0][0] - 1} is durable; free the disk and resume the run"
            ) from error

    def facts(self, after: int = 0) -> Iterator[Entry]:
        """The durable facts with a number above `after`, in order; as they stand when the iteration begins."""
        # Its own connection: another thread may be writing on the first.
        connection = _connect(self._path)
        try:
            yield from read_entries(connection, after)
        finally:
            connection.close()

    def close(self) -> None:
        """Commit what is staged and let another process write. Idempotent."""
        try:
            if self._failure is None:
                self.commit()
        finally:
            self._connection.close()
            self._lock.release()
            self._failure = self._failure or LedgerError("the ledger is closed")

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise LedgerError(f"the ledger takes no more facts: {self._failure}") from self._failure


LINGER_S = 5.0
"""So long the lock of a writer that is dead may still be held."""


class WriterLock:
    """A lock file beside the ledger that the kernel frees when its process dies, however it dies."""

    # The file stays when the lock is released: removing it would let two writers lock two files of that name.

    def __init__(self, path: Path) -> None:
        self._file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        if not self._locked():
            pid = os.pread(self._file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._file)
            raise LedgerError(
                f"{path} is open for writing in process {pid}: a ledger has one writer; stop that run, or use another folder"
            )
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def _locked(self) -> bool:
        """A writer that was killed may leave a child between fork and exec, which holds the lock a moment longer."""
        deadline = time.monotonic() + LINGER_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._writer_lives() or time.monotonic() > deadline:
                    return False
                time.sleep(0.02)
            else:
                return True

    def _writer_lives(self) -> bool:
        pid = os.pread(self._file, 32, 0).strip()
        try:
            os.kill(int(pid), 0)
        except (ValueError, ProcessLookupError):
            return False
        except PermissionError:
            pass  # somebody else's process
        return True

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _connect(path: Path) -> apsw.Connection:
    connection = apsw.Connection(str(path))
    connection.set_busy_timeout(10_000)
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", "full")
    version = connection.pragma("user_version")
    if version not in (0, SCHEMA_VERSION):
        raise LedgerError(
            f"{path} has ledger format {version}, this everlong reads {SCHEMA_VERSION}: use the newer everlong"
        )
    connection.execute(SCHEMA)
    return connection


def read_entries(connection: apsw.Connection, after: int) -> Iterator[Entry]:
    query = "SELECT seq, written_s, fact FROM facts WHERE seq > ? ORDER BY seq"
    for seq, written_s, text in connection.execute(query, (after,)):
        yield Entry(seq=seq, written_s=written_s, fact=decode_fact(text))
