"""A trainer over several processes: the bits of one process, whatever their number, and an error that names a rank that is gone.

Every follower is a process that loads torch, so these take seconds each.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.loop.trainer.ranked import FACTORY, a_batch, build, without_times

from everlong.contracts.errors import WorkerDied
from everlong.contracts.records import ScoreRequest
from everlong.storage import open_store
from everlong.trainer.checkpoint import CheckpointStore
from everlong.trainer.ranks.leader import start_ranks
from everlong.trainer.ranks.ranks import ALONE


@pytest.fixture(autouse=True)
def one_thread():
    """On every rank, and in this process until the test is over."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def described(folder, settings):
    path = folder / "config.json"
    path.write_text(json.dumps({"settings": settings, "store": f"file://{folder}/store"}))
    return str(path)


def trainer_on(folder, settings, num_ranks):
    folder.mkdir(exist_ok=True)
    path = described(folder, settings)
    if num_ranks == 1:
        return build(path, ALONE)
    ranks = start_ranks(FACTORY, path, num_ranks)
    try:
        trainer = build(path, ranks)
        ranks.join()
    except BaseException:
        ranks.close()
        raise
    return trainer


async def trained(folder, settings, num_ranks, batches):
    """Metrics, scores, and the hash of everything the next batch depends on."""
    trainer = trainer_on(folder, settings, num_ranks)
    try:
        await trainer.restore()
        metrics = [without_times((await trainer.train(batch)).metrics) for batch in batches]
        wanted = ("logprobs", "values") if "critic" in settings else ("logprobs",)
        scores = await trainer.score(ScoreRequest(micro_batches=batches[0].micro_batches, wanted=wanted))
        status = await trainer.save()
        await trainer.publish()
    finally:
        await trainer.close()
    checkpoints = CheckpointStore(open_store(f"file://{folder}/store"), 2)
    manifest, _ = checkpoints.load(checkpoints.numbers()[-1])
    return metrics, scores, status, manifest.tensors_hash


@pytest.mark.parametrize(
    "settings", ["critic and hidden clamp", "muon, two updates", "routes of the first pass, hidden clamp"]
)
async def test_the_number_of_ranks_changes_no_bit(tmp_path, settings):
    """Neither of weights, moments and bounds, nor of what is measured; and a checkpoint of one is another's."""
    batches = [a_batch(number, returns="critic" in settings) for number in range(3)]
    one = await trained(tmp_path / "1", settings, 1, batches)
    three = await trained(tmp_path / "3", settings, 3, batches)
    assert one[0] == three[0] and one[2:] == three[2:]
    assert one[0][-1]["grad_norm"] > 0
    for mine, theirs in zip(one[1].logprobs, three[1].logprobs, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    two = await trained(tmp_path / "2", settings, 1, batches[:2])
    resumed = await trained(tmp_path / "2", settings, 2, batches[2:])
    assert two[3] != one[3] and resumed[2:] == one[2:] and resumed[0] == one[0][2:]


async def test_adapters_train_on_more_ranks_than_there_are_micro_batches(tmp_path):
    one = await trained(tmp_path / "1", "adapters", 1, [a_batch(0, 1)])
    two = await trained(tmp_path / "2", "adapters", 2, [a_batch(0, 1)])
    assert one[2:] == two[2:]


@pytest.mark.parametrize("moment", ["before", "while it computes"])
async def test_a_rank_that_is_killed_ends_the_step_with_its_name_and_no_later_call_hangs(tmp_path, moment):
    trainer = trainer_on(tmp_path, "adapters", 2)
    before = await trainer.restore()
    pid = trainer._ranks._followers[0].process.pid
    if moment == "before":
        os.kill(pid, signal.SIGKILL)
        step = asyncio.create_task(trainer.train(a_batch(0)))
    else:
        os.kill(pid, signal.SIGSTOP)  # it hears, and does not get to its part
        step = asyncio.create_task(trainer.train(a_batch(0)))
        await asyncio.wait({step}, timeout=0.5)
        assert not step.done()
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        WorkerDied, match=rf"rank 1 of the trainer \(pid {pid}\) was ended by signal 9 during train.*resume"
    ):
        await step
    with pytest.raises(WorkerDied, match="rank 1 of the trainer"):
        await trainer.train(a_batch(0))
    await trainer.close()
    assert CheckpointStore(open_store(f"file://{tmp_path}/store"), 2).numbers() == [] and before.num_batches == 0


async def test_a_batch_that_is_refused_ends_no_rank(tmp_path):
    trainer = trainer_on(tmp_path, "adapters", 2)
    with pytest.raises(ValueError, match="expected batch 0, got batch 4"):
        await trainer.train(a_batch(4))
    assert (await trainer.train(a_batch(0))).policy_version == 1
    await trainer.close()


async def test_a_rank_that_cannot_be_built_says_why(tmp_path):
    with pytest.raises(
        WorkerDied, match="rank 1 of the trainer .* while it was started: ValueError: no room for another"
    ):
        trainer_on(tmp_path, "breaks", 2)


async def test_what_breaks_in_the_leader_alone_ends_the_others(tmp_path, monkeypatch):
    trainer = trainer_on(tmp_path, "adapters", 2)
    process = trainer._ranks._followers[0].process

    def broken(*arguments, **more):
        raise MemoryError("no room for a gradient")

    monkeypatch.setattr("everlong.trainer.trainer.batch_gradient", broken)
    with pytest.raises(MemoryError, match="no room for a gradient"):
        await trainer.train(a_batch(0))
    assert process.poll() is not None
    with pytest.raises(WorkerDied, match="ended when train failed"):
        await trainer.train(a_batch(0))
    await trainer.close()


LEADER = """
import sys, time
from tests.loop.trainer.test_ranks import trainer_on
from pathlib import Path
trainer = trainer_on(Path(sys.argv[1]), "adapters", 2)
print("ready", flush=True)
time.sleep(600)
"""


def test_a_rank_ends_when_its_leader_is_killed(tmp_path):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    leader = subprocess.Popen([sys.executable, "-c", LEADER, str(tmp_path)], text=True, **pipes)
    assert leader.stdout is not None and leader.stderr is not None
    assert leader.stdout.readline() == "ready\n", leader.stderr.read()
    leader.kill()
    leader.wait()
    assert leader.stderr.read() == ""  # it ends when the last process that could write to it is gone
