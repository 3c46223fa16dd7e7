"""A whole run whose trainer has two ranks, one of which is killed: it stops, says which, and ends resumed in the bits of a run on one
process that nobody disturbed. Whole processes on the toy, so many seconds."""

import os
import signal
import time
from pathlib import Path

import pytest
from tests.campaign.comparing import differences, facts_of, num_facts, outcome_of
from tests.campaign.small_run import make_tasks, small_config, start, start_train

from everlong.ledger import BatchTrained
from everlong.models.numerics import NumericsUnavailable, self_test
from everlong.orchestrator.config import RoundsConfig
from everlong.trainer.clamp_config import HiddenClamp
from everlong.trainer.config import CriticConfig, LinearHead, MuonConfig, PpoConfig, TrainerConfig
from everlong.trajectories.credit import GaeConfig
from everlong.trajectories.packing import PackingConfig

NUM_WARMUP, NUM_BATCHES = 2, 2


def config_of(tasks, folder, ranks):
    return small_config(tasks, folder, "toy", NUM_WARMUP).model_copy(
        update={
            "credit": GaeConfig(),
            "loss": PpoConfig(),
            # what it expects at first is what no episode gets, so that all teach it whatever their rewards
            "critic": CriticConfig(head=LinearHead(initial=0.4)),
            "optimizer": MuonConfig(learning_rate=1e-3, qk_clip=1.0),
            "packing": PackingConfig(micro_batch_tokens=300),
            "trainer": TrainerConfig(ranks=ranks, gradient_clamp=HiddenClamp(share=1e-3)),
            "schedule": RoundsConfig(num_batches=NUM_BATCHES, groups_per_batch=2, group_size=2, checkpoint_every=2),
        }
    )


def rank_of(folder):
    """Process of the rank that follows in a run; None while it has none."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = place.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "everlong.trainer.ranks.follower" in command and str(folder / "config.toml") in command:
            return int(place.parent.name)
    return None


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    try:
        self_test()
    except NumericsUnavailable as refusal:
        pytest.skip(str(refusal))
    folder = tmp_path_factory.mktemp("ranks") / "one"
    control = start_train(config_of(make_tasks(folder.parent / "tasks", easy=True), folder, 1))
    assert control.wait(600) == 0, folder.with_suffix(".log").read_text()
    return folder


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="finds the rank's process in /proc")
def test_a_run_on_two_ranks_one_of_which_is_killed_ends_in_the_bits_of_a_run_on_one(undisturbed):
    moment = next(i for i, fact in enumerate(facts_of(undisturbed)) if isinstance(fact, BatchTrained))
    folder = undisturbed.parent / "two"
    control = start_train(config_of(make_tasks(undisturbed.parent / "tasks", easy=True), folder, 2))
    while control.poll() is None and num_facts(folder) <= moment:
        time.sleep(0.01)
    pid = rank_of(folder)
    assert pid is not None and control.poll() is None, folder.with_suffix(".log").read_text()
    os.kill(pid, signal.SIGKILL)
    assert control.wait(600) != 0, "nobody missed the rank"
    said = folder.with_suffix(".log").read_text()
    assert f"rank 1 of the trainer (pid {pid}) was ended by signal 9 during train" in said and "everlong resume" in said
    log = folder.with_suffix(".resume.log")
    assert start("resume", str(folder), log=log).wait(600) == 0, log.read_text()
    mine, theirs = outcome_of(folder), outcome_of(undisturbed)
    assert differences(theirs, mine) == []
    assert rank_of(folder) is None
