"""What every store promises, run against each that needs no server."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from everlong.contracts.errors import AlreadyExists, NotFound, StoreError
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


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 5000], ids=["empty", "one-byte", "1.3-MB"])
def test_what_was_put_is_got(store: ObjectStore, data: bytes) -> None:
    store.put("a/b", data)
    assert store.get("a/b") == data


def test_put_replaces(store: ObjectStore) -> None:
    store.put("a", b"old")
    store.put("a", b"new")
    assert store.get("a") == b"new"


def test_create_refuses_a_taken_key_and_leaves_it(store: ObjectStore) -> None:
    store.create("versions/00000007", b"first")
    with pytest.raises(AlreadyExists, match="versions/00000007.*read it and compare"):
        store.create("versions/00000007", b"second")
    assert store.get("versions/00000007") == b"first"


def test_of_many_creators_exactly_one_wins(store: ObjectStore) -> None:
    def create(writer: int) -> bool:
        try:
            store.create("commit", str(writer).encode())
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(create, range(16)))
    assert won.count(True) == 1
    assert store.get("commit") == str(won.index(True)).encode()


def test_missing_key_is_not_found(store: ObjectStore) -> None:
    with pytest.raises(NotFound, match="no object '.*nothing/here'"):
        store.get("nothing/here")


def test_list_is_sorted_and_ends_where_a_name_ends(store: ObjectStore) -> None:
    for key in ["a/2", "a/10", "a/b/c", "ab/1", "z"]:
        store.put(key, b"")
    assert store.list("a/") == store.list("a") == ["a/10", "a/2", "a/b/c"]
    assert store.list("") == ["a/10", "a/2", "a/b/c", "ab/1", "z"]
    assert store.list("nothing") == []


def test_delete_is_idempotent(store: ObjectStore) -> None:
    store.put("a", b"1")
    store.delete("a")
    store.delete("a")
    assert store.list("") == []
    store.create("a", b"2")


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "../a", "a/./b"])
def test_keys_that_some_backend_would_misread_are_refused(store: ObjectStore, key: str) -> None:
    for act in (store.get, store.delete, lambda k: store.put(k, b""), lambda k: store.create(k, b"")):
        with pytest.raises(ValueError, match="object key"):
            act(key)


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
    with pytest.raises(ValueError, match=r"no store for 'ftp://x/y': give a folder.*s3://"):
        open_store("ftp://x/y")
