"""The ledger on disk: durable, single-writer, replayable, checkable."""

import asyncio
import fcntl
import multiprocessing
import os
import subprocess
import threading
from pathlib import Path

import apsw
import numpy as np
import pytest

from everlong.contracts.errors import LedgerError, Reason
from everlong.contracts.records import Purpose
from everlong.ledger import (
    EpisodeEnded,
    EpisodeFinished,
    EpisodeStarted,
    EpisodeState,
    GroupOpened,
    Ledger,
    LedgerWriter,
    RunStarted,
    TurnSampled,
    check_ledger,
)

RUN = RunStarted(seed=3, config_hash="c", tasks_hash="t")


def group(number: int) -> GroupOpened:
    return GroupOpened(purpose=Purpose.TRAIN, group=number, task="t", content_hash="h")


def start(number: int) -> EpisodeStarted:
    return EpisodeStarted(episode=f"e{number}", group=0, attempt=number, purpose=Purpose.TRAIN, task="t", incarnation=0)


def turn(number: int, index: int = 0) -> TurnSampled:
    return TurnSampled(episode=f"e{number}", incarnation=0, turn=index, num_tokens=3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.db"


def test_what_was_appended_is_there_after_reopening(path: Path) -> None:
    ledger = Ledger.open(path)
    assert ledger.append(RUN, group(0)) == 2
    assert ledger.append(start(0), turn(0)) == 4
    ledger.close()
    again = Ledger.open(path)
    assert [entry.fact for entry in again.facts()] == [RUN, group(0), start(0), turn(0)]
    assert [entry.seq for entry in again.facts(after=2)] == [3, 4]
    assert again.lifecycle.episodes["e0"].num_sampled == 3 and again.seq == 4
    again.close()


def test_refused_facts_write_nothing_and_leave_the_ledger_usable(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.append(RUN)
    with pytest.raises(LedgerError, match="opened already"):
        ledger.append(group(0), group(1), group(0))
    assert [entry.fact for entry in ledger.facts()] == [RUN] and not ledger.lifecycle.groups
    assert ledger.append(group(0)) == 2
    ledger.close()


def test_second_writer_is_refused_with_the_pid_of_the_first(path: Path) -> None:
    ledger = Ledger.open(path)
    with pytest.raises(LedgerError, match=f"open for writing in process {os.getpid()}: a ledger has one writer"):
        Ledger.open(path)
    ledger.close()
    Ledger.open(path).close()


def _open_elsewhere(path: Path, answers: "multiprocessing.Queue[str]") -> None:
    try:
        Ledger.open(path).close()
        answers.put("opened")
    except LedgerError as error:
        answers.put(str(error))


def test_second_process_is_refused_while_readers_are_not(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.append(RUN)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    other = context.Process(target=_open_elsewhere, args=(path, answers))
    other.start()
    assert f"process {os.getpid()}" in answers.get(timeout=60)
    other.join()
    assert check_ledger(path).num_facts == 1
    ledger.close()


def test_ledger_is_durable_in_every_commit(path: Path) -> None:
    ledger = Ledger.open(path)
    assert ledger._connection.pragma("synchronous") == 2  # FULL
    assert ledger._connection.pragma("journal_mode") == "wal"
    ledger.close()


def test_failed_write_stops_the_ledger_instead_of_running_ahead(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.append(RUN)
    ledger._connection.execute("DROP TABLE facts")
    with pytest.raises(LedgerError, match="facts 2 to 3 could not be written .*nothing after fact 1 is durable"):
        ledger.append(group(0), group(1))
    with pytest.raises(LedgerError, match="takes no more facts"):
        ledger.append(group(2))
    ledger.close()


def test_closed_ledger_takes_no_facts(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="the ledger is closed"):
        ledger.append(RUN)


def test_other_file_is_not_a_ledger(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(LedgerError, match="cannot be opened as a ledger"):
        Ledger.open(path)
    path.unlink()
    Ledger.open(path).close()


def test_ledger_of_a_newer_format_is_refused(path: Path) -> None:
    Ledger.open(path).close()
    connection = apsw.Connection(str(path))
    connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(LedgerError, match="has ledger format 2, this everlong reads 1"):
        Ledger.open(path)


# Group commit


async def test_many_tasks_share_commits_and_every_fact_is_durable_when_its_caller_goes_on(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.append(RUN, group(0), *(start(number) for number in range(20)))
    commits: list[int] = []
    write = ledger.write
    ledger.write = lambda rows: (commits.append(len(rows)), write(rows))[1]  # type: ignore[method-assign]
    writer = LedgerWriter(ledger)

    async def episode(number: int) -> None:
        for index in range(5):
            seq = await writer.append(turn(number, index))
            durable = {entry.seq: entry.fact for entry in ledger.facts(after=seq - 1)}
            assert durable[seq] == turn(number, index)

    await asyncio.gather(*(episode(number) for number in range(20)))
    await writer.close()
    ledger.close()
    assert sum(commits) == 100 and len(commits) < 50
    assert check_ledger(path).ok and check_ledger(path).num_facts == 122


async def test_invalid_fact_of_one_task_does_not_harm_the_others(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.append(RUN, group(0), start(0), start(1))
    writer = LedgerWriter(ledger)
    results = await asyncio.gather(
        writer.append(turn(0)), writer.append(turn(7)), writer.append(turn(1)), return_exceptions=True
    )
    await writer.close()
    assert results[0] == 5 and results[2] == 6 and isinstance(results[1], LedgerError)
    assert [entry.fact for entry in ledger.facts(after=4)] == [turn(0), turn(1)]
    ledger.close()


async def test_cancelled_caller_leaves_its_facts_and_the_writer_alive(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.append(RUN, group(0), start(0), start(1))
    writer = LedgerWriter(ledger)
    waiting = asyncio.create_task(writer.append(turn(0)))
    await asyncio.sleep(0)
    waiting.cancel()
    await writer.append(turn(1))
    await writer.close()
    assert [entry.fact for entry in ledger.facts(after=4)] == [turn(0), turn(1)]
    ledger.close()


async def test_failed_commit_reaches_every_waiting_task(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.append(RUN, group(0), *(start(number) for number in range(3)))
    ledger._connection.execute("DROP TABLE facts")
    writer = LedgerWriter(ledger)
    results = await asyncio.gather(*(writer.append(turn(number)) for number in range(3)), return_exceptions=True)
    assert all(isinstance(result, LedgerError) and "could not be written" in str(result) for result in results)
    with pytest.raises(LedgerError, match="takes no more facts"):
        await writer.append(turn(0, 1))
    await writer.close()
    with pytest.raises(LedgerError, match="writer is closed"):
        await writer.append(turn(0, 2))
    ledger.close()


# Check


def tamper(path: Path, statement: str) -> None:
    connection = apsw.Connection(str(path))
    connection.execute(statement)
    connection.close()


@pytest.fixture
def ended(path: Path) -> Path:
    """A ledger with one ended and one open episode."""
    ledger = Ledger.open(path)
    end = EpisodeEnded(episode="e0", state=EpisodeState.FAILED, reason="crash", trained=0, discarded={"crash": 3})
    ledger.append(RUN, group(0), start(0), start(1), turn(0), end)
    ledger.close()
    return path


def test_sound_ledger_passes_with_its_balance(ended: Path) -> None:
    report = check_ledger(ended)
    assert report.ok and report.problems == () and report.num_facts == 6
    assert report.balance.ended == {"failed": {"crash": 1}} and report.balance.open == {"running": 1}
    assert check_ledger(ended.parent) == report


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("DELETE FROM facts WHERE seq = 5", "expected fact 5, got fact 6"),
        ("INSERT INTO facts SELECT 7, written_s, fact FROM facts WHERE seq = 6", "ended after its end as failed"),
        ("UPDATE facts SET fact = replace(fact, '\"num_tokens\":3', '\"num_tokens\":4')", "but sampled 4"),
        ("UPDATE facts SET fact = '{' WHERE seq = 6", "after fact 5: not a fact"),
        ("UPDATE facts SET fact = replace(fact, 'EpisodeEnded', 'EpisodeVanished')", "not a fact"),
        ("DROP TABLE facts", "after fact 0"),
    ],
    ids=["missing", "twice", "changed", "damaged", "unknown", "no-table"],
)
def test_tampered_ledger_is_found_out(ended: Path, statement: str, problem: str) -> None:
    tamper(ended, statement)
    report = check_ledger(ended)
    assert not report.ok and any(problem in found for found in report.problems), report.problems


def test_second_end_is_found_by_the_plain_count_too(ended: Path) -> None:
    tamper(ended, "INSERT INTO facts SELECT 7, written_s, fact FROM facts WHERE seq = 6")
    assert "episode e0 has 2 ends" in check_ledger(ended).problems


def test_missing_ledger_says_where_it_was_looked_for(path: Path) -> None:
    with pytest.raises(LedgerError, match=f"there is no ledger at {path}"):
        check_ledger(path)
    assert not path.exists()


@pytest.mark.parametrize(
    "reward", [True, "1.0", np.float32(1.0)], ids=["a truth value", "a text", "a number of another library"]
)
def test_facts_that_could_not_be_read_back_are_refused_all_together(reward: object, path: Path) -> None:
    ledger = Ledger.open(path)
    wrong = EpisodeFinished(
        episode="train-000000-000",
        incarnation=0,
        reason=Reason.DONE,
        reward=reward,  # ty: ignore[invalid-argument-type]
        num_sampled=0,
        payload_key="k",
        payload_hash="h",
    )
    with pytest.raises(LedgerError, match="whose fields have their types"):
        ledger.stage(group(0), wrong)
    assert ledger.take_staged() == [] and not ledger.lifecycle.groups
    ledger.close()


def test_the_lock_of_a_dead_writer_that_a_child_still_holds_is_waited_for(path: Path) -> None:
    ledger = Ledger.open(path)
    held = os.open(f"{path}.lock", os.O_RDWR)
    ledger.close()
    fcntl.flock(held, fcntl.LOCK_EX)
    gone = subprocess.Popen(["true"])
    gone.wait()
    os.pwrite(held, f"{gone.pid}\n".encode().ljust(16), 0)
    release = threading.Timer(0.2, os.close, [held])
    release.start()
    Ledger.open(path).close()
    release.join()
