"""The contract of the stores that need no server, and what is a folder's own."""

from pathlib import Path

import pytest
from tests.store_contract import *  # noqa: F403

from everlong.contracts.errors import StoreError
from everlong.contracts.ports import ObjectStore
from everlong.storage import open_store


@pytest.fixture(params=["memory", "folder", "file-url"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    match request.param:
        case "memory":
            return open_store("memory://")
        case "folder":
            return open_store(str(tmp_path / "new" / "store"))
    return open_store((tmp_path / "with space").as_uri())


def test_folder_store_keeps_objects_for_the_next_process_that_opens_it(tmp_path: Path) -> None:
    open_store(str(tmp_path)).put("a/b", b"kept")
    assert open_store(tmp_path.as_uri()).get("a/b") == b"kept"
    assert (tmp_path / "a" / "b").read_bytes() == b"kept"


def test_folder_where_a_file_is_in_the_way_is_a_store_error(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a", b"file")
    with pytest.raises(StoreError, match="cannot put 'a/b'"):
        store.put("a/b", b"below a file")


def test_what_the_system_refused_is_told_with_what_to_do(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a", b"file")
    with pytest.raises(
        StoreError, match=r"cannot put 'a/b' in .*: a folder was expected, and a file lies on the way"
    ) as raised:
        store.put("a/b", b"below a file")
    assert "os error" not in str(raised.value)


def test_unknown_scheme_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"no store for 'ftp://x/y': give a folder.*s3://") as refusal:
        open_store("ftp://x/y")
    assert "memory" not in str(refusal.value), "no run can use that"


@pytest.mark.parametrize("url", ["s3://", "gs:///path", "az://"])
def test_a_url_without_a_bucket_is_refused_with_the_form(url: str) -> None:
    with pytest.raises(ValueError, match=f"names a bucket, {url[:2]}://BUCKET or .*, got '{url}'"):
        open_store(url)


@pytest.mark.parametrize("url", ["s3://key:hush@bucket/run", "az://bucket/run?sig=hush", "gs://bucket#hush"])
def test_a_url_with_a_secret_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ValueError, match="give credentials in the environment") as refusal:
        open_store(url)
    assert "hush" not in str(refusal.value)
