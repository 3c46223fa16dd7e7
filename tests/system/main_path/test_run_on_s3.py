"""Whole runs whose store is a real S3 server: killed, or their server killed, they end in the weights of the run on a folder."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tests.campaign.comparing import num_facts
from tests.campaign.kill import Campaign
from tests.seaweedfs import KEY, SECRET, SeaweedFS, needs_seaweedfs

from everlong.models.numerics import NumericsUnavailable, self_test
from everlong.storage import open_store

pytestmark = [needs_seaweedfs, pytest.mark.timeout(900)]
RUN_S = 600.0


@pytest.fixture(scope="module", params=["scripted", "toy"])
def on_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    """The reference's campaign. The toy has a network, whose weights repeat bit for bit, and checkpoints of it."""
    if request.param == "toy":
        try:
            self_test()
        except NumericsUnavailable as refusal:
            pytest.skip(str(refusal))
    num_warmup = 24 if request.param == "toy" else 2  # until its groups differ in their rewards
    campaign = Campaign(tmp_path_factory.mktemp(request.param), request.param, num_warmup, seed=5)
    assert campaign.reference().outcome.tokens_trained > 0
    return campaign


@pytest.fixture
def campaign(on_folder: Campaign, s3_url: str) -> Campaign:
    return replace(on_folder, stores=s3_url)


def test_a_run_on_s3_that_is_killed_ends_like_the_one_on_a_folder_and_writes_down_no_secret(campaign: Campaign) -> None:
    run = campaign.kill("both", 0, campaign.reference())
    assert run.failures == ()
    stored = open_store(campaign.stores or "").list("")
    assert any("/weights/versions/" in key for key in stored) and any("/episodes/" in key for key in stored)
    assert not list(campaign.work.glob("runs/both*/store")), "nothing of the store is in the run's folder"
    assert secrets_below(campaign.work) == []


def test_a_run_waits_for_a_server_that_was_killed_and_comes_back(campaign: Campaign, s3_server: SeaweedFS) -> None:
    reference = campaign.reference().outcome
    folder, control = campaign.start("waits")
    with ended(control):
        while num_facts(folder) < reference.num_facts // 2:
            assert control.poll() is None, folder.with_suffix(".log").read_text()
            time.sleep(0.02)
        s3_server.kill()
        s3_server.start()
        if control.wait(RUN_S) != 0:  # on a slow machine the server may need longer than the run's patience
            assert "nobody answered there" in folder.with_suffix(".log").read_text()
            assert campaign.resume_to_end(folder)[1] == []
    assert campaign.check(folder, reference) == []
    assert secrets_below(campaign.work) == []


def test_a_run_whose_server_stays_away_says_so_and_loses_nothing(campaign: Campaign, s3_server: SeaweedFS) -> None:
    reference = campaign.reference().outcome
    folder, control = campaign.start("stops")
    with ended(control):
        while num_facts(folder) < reference.num_facts // 2:
            assert control.poll() is None, folder.with_suffix(".log").read_text()
            time.sleep(0.02)
        s3_server.kill()
        try:
            code = control.wait(RUN_S)
        finally:
            s3_server.start()
    said = folder.with_suffix(".log").read_text()
    assert code == 1 and f"in {campaign.stores}/{folder.name}" in said and "nobody answered there" in said
    assert campaign.resume_to_end(folder)[1] == []
    assert campaign.check(folder, reference) == []
    assert secrets_below(campaign.work) == []


@contextmanager
def ended(control) -> Iterator[None]:
    """The process is gone afterwards, also where the test failed."""
    try:
        yield
    finally:
        if control.poll() is None:
            control.kill()
            control.wait()


def secrets_below(folder: Path) -> list[str]:
    """Files that hold the key or the secret: config, ledger, logs, metrics, report."""
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and any(word.encode() in path.read_bytes() for word in (KEY, SECRET))
    ]
