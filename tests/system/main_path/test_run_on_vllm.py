"""A whole run whose engine is the real vLLM server, killed while it samples. Two starts of it, so minutes."""

import os
import signal
import time

from tests.campaign.comparing import facts_of
from tests.campaign.small_run import make_tasks, small_config, start, start_train
from tests.kept_server import needs_vllm, processes_of

from everlong.contracts.errors import LedgerError
from everlong.contracts.records import Purpose
from everlong.engines.config import VllmConfig
from everlong.ledger import EpisodeFinished, TokensDiscarded, read_lifecycle
from everlong.observe import read_points

pytestmark = needs_vllm
SERVER = "vllm.entrypoints.openai.api_server"


def test_a_run_whose_server_is_killed_while_it_samples_loses_no_episode(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERLONG_TEST", str(tmp_path))  # by which its processes are found
    config = small_config(make_tasks(tmp_path / "tasks", easy=True), tmp_path / "run", "toy", num_warmup=24)
    schedule = config.schedule.model_copy(update={"num_batches": 2})
    engine = VllmConfig(max_running=8, cache_mb=64, max_restarts=1)
    config = config.model_copy(update={"numerics": "fast", "schedule": schedule, "engine": engine})
    run = start_train(config)
    log = config.output.with_suffix(".log")
    try:
        while not training_episodes_are_open(config.output):
            assert run.poll() is None, log.read_text()
            time.sleep(0.02)
        (server,) = processes_of(SERVER, tmp_path)
        os.kill(server, signal.SIGKILL)
        assert run.wait(600) == 0, log.read_text()
    finally:
        run.kill()
        run.wait()
    facts = facts_of(config.output)
    assert all(fact.reason.trustworthy for fact in facts if isinstance(fact, EpisodeFinished))
    assert not [fact for fact in facts if isinstance(fact, TokensDiscarded)]
    lifecycle = read_lifecycle(config.output / "ledger.db")
    trained = [view for view in lifecycle.episodes.values() if view.purpose is Purpose.TRAIN]
    assert lifecycle.finished and not lifecycle.open_episodes()
    assert len(trained) == 2 * schedule.groups_per_batch * schedule.group_size
    losses = [point.values.get("engine/server_losses") for point in read_points(config.output / "metrics.jsonl")]
    assert max(filter(None, losses)) == 1.0
    assert start("ledger", "check", str(config.output), log=log).wait(60) == 0


def training_episodes_are_open(folder):
    try:
        open_ones = read_lifecycle(folder / "ledger.db").open_episodes()
    except (LedgerError, OSError):
        return False  # there is none yet
    return any(view.purpose is Purpose.TRAIN for view in open_ones)
