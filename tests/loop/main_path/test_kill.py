"""One kill of every process, in small: the campaign of `tests/campaign` with the scripted model. Whole processes, so seconds."""

import signal

import pytest
from msgspec.structs import replace
from tests.campaign.comparing import differences, facts_of, outcome_of
from tests.campaign.kill import TARGETS, Campaign
from tests.campaign.small_run import start


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    return Campaign(tmp_path_factory.mktemp("kill"), "scripted", num_warmup=2, seed=5)


@pytest.mark.parametrize("target", TARGETS)
def test_a_killed_run_is_resumed_to_the_weights_of_the_undisturbed_one(campaign, target):
    reference = campaign.reference()
    assert reference.outcome.tokens_trained > 0 and len(reference.outcome.batches) == 6
    run = campaign.kill(target, 0, reference)
    assert run.failures == ()


def test_what_differs_is_seen(campaign):
    reference = campaign.reference().outcome
    assert differences(reference, reference) == []
    assert differences(reference, replace(reference, weights="others"))
    assert differences(reference, replace(reference, batches=reference.batches[:-1]))
    assert differences(reference, replace(reference, episodes=dict(list(reference.episodes.items())[1:])))


def test_a_finished_run_is_left_as_it_is(campaign):
    campaign.reference()
    folder = campaign.work / "runs" / "reference-0"
    before = facts_of(folder), outcome_of(folder)
    log = campaign.work / "finished.log"
    (folder / "report.html").unlink()  # as if it had been killed behind its last fact
    assert start("resume", str(folder), log=log).wait(60) == 0
    assert f"finished already: {folder}" in log.read_text()
    assert (facts_of(folder), outcome_of(folder)) == before
    assert "</html>" in (folder / "report.html").read_text()


def test_a_run_that_died_before_its_first_fact_starts_from_the_beginning(campaign):
    reference = campaign.reference()
    folder, control = campaign.start("young")
    while not (folder / "config.toml").exists():
        assert control.poll() is None
    control.send_signal(signal.SIGKILL)
    control.wait()
    for path in folder.glob("ledger.db*"):  # whatever it got to, nothing of it reached the disk
        path.unlink()
    assert facts_of(folder) == []
    assert start("resume", str(folder), log=folder.with_suffix(".log")).wait(60) == 0
    assert campaign.check(folder, reference.outcome) == []


def test_a_second_process_on_a_run_is_refused_with_the_id_of_the_first(campaign):
    folder, control = campaign.start("shared")
    try:
        while not (folder / "worker.log").exists():  # the ledger is open before the worker starts
            assert control.poll() is None
        log = campaign.work / "second.log"
        assert start("resume", str(folder), log=log).wait(60) == 1
        assert f"open for writing in process {control.pid}" in log.read_text()
        assert control.wait(60) == 0, "the first one did not notice"
    finally:
        control.kill()
        control.wait()
    assert campaign.check(folder, campaign.reference().outcome) == []
