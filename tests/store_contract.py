"""What every store promises. A test module of each backend imports everything here and gives the fixture `store`, an empty one."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from everlong.contracts.errors import AlreadyExists, NotFound
from everlong.contracts.ports import ObjectStore

RACES, WRITERS = 6, 16
"""SeaweedFS lets the writers of one key wait for each other in steps of a second."""


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


def test_of_many_creators_exactly_one_wins_every_time(store: ObjectStore) -> None:
    def create(key: str, writer: int, ready: Barrier) -> bool:
        ready.wait(60)
        try:
            store.create(key, str(writer).encode())
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(WRITERS) as threads:
        for round_ in range(RACES):
            key, ready = f"commits/{round_:08d}", Barrier(WRITERS)
            won = list(threads.map(create, [key] * WRITERS, range(WRITERS), [ready] * WRITERS))
            assert won.count(True) == 1
            assert store.get(key) == str(won.index(True)).encode()


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
