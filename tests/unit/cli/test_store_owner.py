"""A store has one owner: another run is refused before anything is written, and who is first of two is decided by the store."""

import pytest
from tests.fake_bucket import fake_bucket

from everlong.cli.config import RunConfig
from everlong.cli.run_folder import RunFolder
from everlong.cli.store_owner import OWNER, claim_store, refuse_taken_store
from everlong.contracts.errors import StoreError
from everlong.storage import open_store


@pytest.fixture(params=["folder", "url"])
def shared(request, tmp_path) -> RunConfig:
    store = tmp_path / "shared"
    return RunConfig.model_validate({"weights": {"store": str(store) if request.param == "folder" else store.as_uri()}})


def test_a_store_that_is_not_there_yet_is_free_and_is_not_made_by_asking(shared, tmp_path):
    refuse_taken_store(shared, RunFolder(tmp_path / "mine"))
    assert list(tmp_path.iterdir()) == []


def test_a_claimed_store_is_refused_to_others_and_taken_up_by_its_owner(shared, tmp_path):
    mine, other = RunFolder(tmp_path / "mine"), RunFolder(tmp_path / "other")
    claim_store(shared, mine)
    refuse_taken_store(shared, mine)
    claim_store(shared, mine)
    for act in (refuse_taken_store, claim_store):
        with pytest.raises(ValueError, match=rf"belongs to the run {mine.path} on .*--weights\.store"):
            act(shared, other)
    assert not other.path.exists()


@pytest.mark.parametrize("key", ["weights/versions/00000000", "checkpoints/000001", "episodes/a/000"])
def test_a_store_in_which_a_run_has_written_is_refused_also_to_a_new_run_of_that_name(shared, tmp_path, key):
    mine = RunFolder(tmp_path / "mine")
    store = open_store(shared.weights.store)
    store.put(key, b"x")
    with pytest.raises(ValueError, match="belongs to a run that did not say its name"):
        refuse_taken_store(shared, mine)
    claim_store(shared, mine)
    with pytest.raises(ValueError, match=f"belongs to the run {mine.path}"):
        refuse_taken_store(shared, mine)


def test_other_things_in_a_bucket_are_nobodys(shared, tmp_path):
    open_store(shared.weights.store).put("notes/readme", b"x")
    refuse_taken_store(shared, RunFolder(tmp_path / "mine"))
    claim_store(shared, RunFolder(tmp_path / "mine"))
    assert OWNER in open_store(shared.weights.store).list()


def test_a_server_that_lets_writers_overwrite_each_other_is_refused(tmp_path, monkeypatch):
    with (
        fake_bucket(monkeypatch) as url,
        pytest.raises(StoreError, match="took an object that was there already.*If-None-Match"),
    ):
        claim_store(RunConfig.model_validate({"weights": {"store": url}}), RunFolder(tmp_path / "mine"))
