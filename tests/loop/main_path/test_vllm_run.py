"""A whole run whose engine is a vLLM server, a fake of it, which dies twice on the way. Whole processes, so many seconds."""

import time

from tests.campaign.comparing import facts_of
from tests.campaign.small_run import make_tasks, small_config, start, start_train
from tests.fake_vllm import write_python
from tests.kept_server import processes_of

from everlong.engines.config import VllmConfig
from everlong.ledger import EngineUpdated, EpisodeFinished, TokensDiscarded, read_lifecycle


def vllm_run(folder):
    config = small_config(make_tasks(folder / "tasks", easy=True), folder / "run", "toy", num_warmup=1)
    schedule = config.schedule.model_copy(update={"num_batches": 2, "groups_per_batch": 2})
    engine = VllmConfig(python=write_python(folder), max_restarts=1)
    return config.model_copy(update={"numerics": "fast", "schedule": schedule, "engine": engine})


def test_a_run_whose_server_dies_loses_no_episode(tmp_path, monkeypatch):
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("FAKE_VLLM_FAULTS", str(faults))
    (faults / "die").touch()
    config = vllm_run(tmp_path)
    run = start_train(config)
    log = config.output.with_suffix(".log")
    try:
        while (faults / "die").exists():
            assert run.poll() is None, log.read_text()
            time.sleep(0.1)  # until the first one has died
        (faults / "die").touch()
        assert run.wait(240) == 0, log.read_text()
    finally:
        run.kill()
        run.wait()
    assert not (faults / "die").exists()
    facts = facts_of(config.output)
    finished = [fact for fact in facts if isinstance(fact, EpisodeFinished)]
    assert all(fact.reason.trustworthy for fact in finished)
    assert not [fact for fact in facts if isinstance(fact, TokensDiscarded)]
    lifecycle = read_lifecycle(config.output / "ledger.db")
    assert lifecycle.finished and not lifecycle.open_episodes()
    updates = [fact.version for fact in facts if isinstance(fact, EngineUpdated)]
    assert updates == sorted(updates) and updates[-1] == lifecycle.published_version
    assert start("ledger", "check", str(config.output), log=log).wait(60) == 0
    until_gone(tmp_path)


def test_the_server_does_not_outlive_a_run_that_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM_FAULTS", str(tmp_path))
    run = start_train(vllm_run(tmp_path))
    try:
        while not processes_of("tests.fake_vllm", tmp_path):
            assert run.poll() is None
            time.sleep(0.1)  # until the server is started
    finally:
        run.kill()
        run.wait()
    until_gone(tmp_path)


def until_gone(folder):
    """The server's launcher notices a moment later that its owner is gone."""
    deadline = time.monotonic() + 60
    while processes_of("tests.fake_vllm", folder):
        assert time.monotonic() < deadline, "the server is still there"
        time.sleep(0.1)
