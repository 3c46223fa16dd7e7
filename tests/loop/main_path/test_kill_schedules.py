"""Whole processes of a run that overlaps or pauses, killed once each: both workers end, and the resumed run is whole."""

import signal
import time

import pytest
from tests.campaign.comparing import facts_of, num_facts, sampled_twice
from tests.campaign.processes import left_over
from tests.campaign.small_run import make_tasks, small_config, start, start_train

from everlong.ledger import BatchClosed, BatchTrained
from everlong.orchestrator.config import AsyncConfig, PartialConfig

SMALL = {"num_batches": 4, "groups_per_batch": 3, "group_size": 4, "checkpoint_every": 2}
SCHEDULES = {"async": AsyncConfig(**SMALL, max_staleness=2), "partial": PartialConfig(**SMALL, completion=0.5)}
KILL_AT_FACT = 60


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_killed_run_is_resumed_to_its_end_and_every_group_trains_once(tmp_path, name):
    folder = tmp_path / "run"
    tasks = make_tasks(tmp_path / "tasks", easy=False)
    config = small_config(tasks, folder, "scripted", 1).model_copy(update={"schedule": SCHEDULES[name]})
    control = start_train(config)
    while control.poll() is None and num_facts(folder) < KILL_AT_FACT:
        time.sleep(0.01)
    assert control.poll() is None, folder.with_suffix(".log").read_text()
    assert {path.stem for path in folder.glob("*.lock")} >= ({"engine", "trainer"} if name == "async" else {"worker"})
    control.send_signal(signal.SIGKILL)
    control.wait()
    assert left_over(folder, folders=False, patience_s=60) == [], "workers end by themselves"
    log = tmp_path / "resume.log"
    assert start("resume", str(folder), log=log).wait(300) == 0, log.read_text()
    assert start("ledger", "check", str(folder), log=log).wait(60) == 0, log.read_text()
    facts = facts_of(folder)
    assert sampled_twice(facts) == []
    groups = [group for fact in facts if isinstance(fact, BatchClosed) for group in fact.groups]
    assert sorted(groups) == list(range(len(groups))) and groups
    assert {fact.batch for fact in facts if isinstance(fact, BatchTrained)} == set(range(5))
