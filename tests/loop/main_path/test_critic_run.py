"""A whole run whose credit comes from a critic, killed once: it ends in the bits of the run that nobody disturbed. Whole processes
on the toy, so many seconds."""

import json
import signal
import time

import pytest
from tests.campaign.comparing import differences, facts_of, num_facts, outcome_of
from tests.campaign.small_run import make_tasks, small_config, start, start_train

from everlong.cli.run_folder import RunFolder
from everlong.ledger import BatchTrained
from everlong.models.numerics import NumericsUnavailable, self_test
from everlong.orchestrator.config import RoundsConfig
from everlong.storage import open_store
from everlong.trainer.checkpoint import CheckpointStore
from everlong.trainer.config import CriticConfig, LinearHead, PpoConfig
from everlong.trajectories.credit import GaeConfig, LengthDecay

NUM_WARMUP, NUM_BATCHES, PRETRAINED = 6, 4, 1
KILL_AFTER = NUM_WARMUP + 2
"""The batch whose end the kill follows: the checkpoint before it is one batch older, within the critic's time with the policy."""


def config_of(tasks, folder):
    return small_config(tasks, folder, "toy", NUM_WARMUP).model_copy(
        update={
            "credit": GaeConfig(decay=LengthDecay(), malformed_call=0.1),
            "loss": PpoConfig(),
            # what it expects at first is what no episode gets, so that all teach it whatever their rewards
            "critic": CriticConfig(head=LinearHead(initial=0.4), pretrain_batches=PRETRAINED),
            "schedule": RoundsConfig(num_batches=NUM_BATCHES, groups_per_batch=2, group_size=3, checkpoint_every=2),
        }
    )


def newest_checkpoint(folder):
    """Hash of everything the next update depends on, the critic's state with it, and the names of its tensors."""
    run = RunFolder(folder)
    checkpoints = CheckpointStore(open_store(run.store_url(run.read_config())), 2)
    manifest, tensors = checkpoints.load(checkpoints.numbers()[-1])
    return manifest.tensors_hash, tensors.keys()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    try:
        self_test()
    except NumericsUnavailable as refusal:
        pytest.skip(str(refusal))
    folder = tmp_path_factory.mktemp("critic") / "undisturbed"
    control = start_train(config_of(make_tasks(folder.parent / "tasks", easy=True), folder))
    assert control.wait(600) == 0, folder.with_suffix(".log").read_text()
    return folder


def test_a_killed_run_ends_with_the_policy_and_the_critic_of_the_undisturbed_one(undisturbed):
    facts = facts_of(undisturbed)
    moment = next(i for i, fact in enumerate(facts) if isinstance(fact, BatchTrained) and fact.batch == KILL_AFTER)
    folder = undisturbed.parent / "killed"
    control = start_train(config_of(make_tasks(undisturbed.parent / "tasks", easy=True), folder))
    while control.poll() is None and num_facts(folder) <= moment:
        time.sleep(0.01)
    assert control.poll() is None, "it ended before it could be killed"
    control.send_signal(signal.SIGKILL)
    control.wait()
    log = folder.with_suffix(".resume.log")
    assert start("resume", str(folder), log=log).wait(600) == 0, log.read_text()
    assert differences(outcome_of(undisturbed), outcome_of(folder)) == []
    (digest, names), (expected, _) = newest_checkpoint(folder), newest_checkpoint(undisturbed)
    assert digest == expected
    assert {"critic/num_batches", "critic/master/value_head.weight", "critic/exp_avg/value_head.weight"} <= names


def test_the_critic_learns_before_the_policy_moves(undisturbed):
    rows = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    batches = [row for row in rows if row["axis"] == "batch" and row["step"] >= NUM_WARMUP]
    assert len(batches) == NUM_BATCHES
    values = [row["values"] for row in batches]
    assert [("grad_norm" in row) for row in values] == [False] * PRETRAINED + [True] * (NUM_BATCHES - PRETRAINED)
    assert all(
        row["critic/updates"] == 2 and row["critic/grad_norm"] > 0 and row["seconds/scoring"] >= 0 for row in values
    )
