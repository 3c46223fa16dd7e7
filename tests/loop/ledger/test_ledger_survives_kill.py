"""A writer killed at random moments: what it acknowledged is in the ledger, and the ledger is sound."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from everlong.ledger import EpisodeInterrupted, Ledger, RunResumed, check_ledger

WRITER = """
import asyncio, sys
from everlong.contracts.records import Purpose
from everlong.ledger import *

async def episode(writer, name, attempt, group):
    start = EpisodeStarted(episode=name, group=group, attempt=attempt, purpose=Purpose.TRAIN, task="t", incarnation=0)
    print(await writer.append(start), flush=True)
    for turn in range(1000):
        print(await writer.append(TurnSampled(episode=name, incarnation=0, turn=turn, num_tokens=turn)), flush=True)

async def main(path, group):
    ledger = Ledger.open(path)
    if ledger.seq == 0:
        ledger.append(RunStarted(seed=0, config_hash="", tasks_hash=""))
    writer = LedgerWriter(ledger)
    opened = GroupOpened(purpose=Purpose.TRAIN, group=group, task="t", content_hash="")
    print(await writer.append(opened), flush=True)
    await asyncio.gather(*(episode(writer, f"{group}-{attempt}", attempt, group) for attempt in range(8)))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def test_acknowledged_facts_survive_kill_9_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    rng = np.random.default_rng(0)
    acknowledged: set[int] = set()
    for group in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(group)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        acknowledged.add(int(writer.stdout.readline()))
        time.sleep(rng.uniform(0, 0.15))
        writer.kill()
        acknowledged |= {int(line) for line in writer.stdout.read().split("\n")[:-1]}
        writer.wait()

        ledger = Ledger.open(path)
        assert acknowledged <= {entry.seq for entry in ledger.facts()}
        lost = ledger.lifecycle.open_episodes()
        running = [view for view in lost if view.state == "running"]
        ledger.append(
            RunResumed(),
            *(EpisodeInterrupted(episode=view.episode, incarnation=view.incarnation) for view in running),
        )
        acknowledged.add(ledger.seq)
        ledger.close()
        report = check_ledger(path)
        assert report.ok, report.problems
        assert report.balance.tokens_open == 0
    assert len(acknowledged) > 6 * 9 and report.balance.tokens_discarded["interrupted"] > 0
