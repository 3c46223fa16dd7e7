"""Replays a ledger from disk and adds it up a second way, trusting neither the running process nor any counter."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import apsw

from everlong.contracts.errors import LedgerError
from everlong.contracts.records import Record
from everlong.ledger.facts import (
    CallUncounted,
    EpisodeEnded,
    EpisodeStarted,
    Fact,
    RunFinished,
    TokensDiscarded,
    TurnSampled,
)
from everlong.ledger.ledger import LEDGER_FILE, read_entries
from everlong.ledger.lifecycle import Lifecycle, replay
from everlong.ledger.views import Balance, Decile

MAX_PROBLEMS = 20
"""A broken ledger breaks every later fact; the first few say where."""


class LedgerReport(Record, frozen=True, kw_only=True):
    ok: bool
    num_facts: int
    problems: tuple[str, ...]
    """Each with the number of the fact it was found at, at most 20."""
    balance: Balance
    deciles: tuple[Decile, ...] = ()
    """Losses by length, from the shortest tenth of the ended episodes to the longest."""


def check_ledger(path: str | Path) -> LedgerReport:
    """Also while a run writes to it. Raises LedgerError where there is no ledger to read."""
    connection = _open(Path(path))
    try:
        return _check(connection)
    finally:
        connection.close()


def read_lifecycle(path: str | Path) -> Lifecycle:
    """What the facts on disk amount to, also while a run writes. Raises LedgerError for a ledger that is not whole."""
    connection = _open(Path(path))
    try:
        return replay(entry.fact for entry in read_entries(connection, 0))
    finally:
        connection.close()


def _open(path: Path) -> apsw.Connection:
    """Of a ledger file, or of the one in a run's folder."""
    if path.is_dir():
        path = path / LEDGER_FILE
    if not path.is_file():
        raise LedgerError(f"there is no ledger at {path}: give the run's folder or its ledger file")
    try:
        connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
        connection.set_busy_timeout(10_000)
    except apsw.Error as error:
        raise LedgerError(f"{path} cannot be opened as a ledger: {error}") from error
    return connection


def _check(connection: apsw.Connection) -> LedgerReport:
    lifecycle, facts, problems = Lifecycle(), [], []
    try:
        integrity = connection.execute("PRAGMA integrity_check").get
        if integrity != "ok":
            problems.append(f"SQLite says the file is damaged: {integrity}")
        for number, entry in enumerate(read_entries(connection, 0), start=1):
            if entry.seq != number:
                problems.append(f"expected fact {number}, got fact {entry.seq}: facts are missing")
                break
            facts.append(entry.fact)
            problems += _apply(lifecycle, entry.seq, entry.fact)
    except (apsw.Error, LedgerError) as error:
        problems.append(f"after fact {len(facts)}: {error}")
    balance = lifecycle.balance()
    problems += _add_up(facts, balance)
    return LedgerReport(
        ok=not problems,
        num_facts=len(facts),
        problems=tuple(problems[:MAX_PROBLEMS]),
        balance=balance,
        deciles=tuple(lifecycle.loss_by_length_decile()),
    )


def _apply(lifecycle: Lifecycle, seq: int, fact: Fact) -> list[str]:
    try:
        lifecycle.apply(fact)
    except LedgerError as error:
        return [f"fact {seq}: {error}"]
    return []


def _add_up(facts: list[Fact], balance: Balance) -> list[str]:
    """What the bare facts say, counted without the state machine."""
    started = {fact.episode for fact in facts if isinstance(fact, EpisodeStarted)}
    ends = Counter(fact.episode for fact in facts if isinstance(fact, EpisodeEnded))
    sampled = sum(fact.num_tokens for fact in facts if isinstance(fact, TurnSampled | TokensDiscarded))
    trained = sum(fact.trained for fact in facts if isinstance(fact, EpisodeEnded))
    still_open = len(started) - len(ends)
    problems = [f"episode {name} has {count} ends" for name, count in ends.items() if count != 1]
    problems += [f"episode {name} ended without a start" for name in ends if name not in started]
    if (balance.offered, sum(balance.open.values())) != (len(started), still_open):
        problems.append(f"{len(started)} episodes started and {still_open} are open, the balance says {balance}")
    if (balance.tokens_sampled, balance.tokens_trained) != (sampled, trained):
        problems.append(f"{sampled} tokens were sampled and {trained} trained, the balance says {balance}")
    uncounted = sum(isinstance(fact, CallUncounted) for fact in facts)
    if balance.calls_uncounted != uncounted:
        problems.append(f"{uncounted} calls were not counted, the balance says {balance}")
    if not balance.holds:
        problems.append(f"the balance does not add up: {balance}")
    if facts and isinstance(facts[-1], RunFinished) and still_open:
        problems.append(f"the run finished with {still_open} episodes open")
    return problems
