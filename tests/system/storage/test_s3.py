"""The contract of every store on a real S3 server, and what it says when something is wrong."""

import traceback
from collections.abc import Iterator

import pytest
from tests.cutting_proxy import CuttingProxy
from tests.seaweedfs import BUCKET, SECRET, SeaweedFS, needs_seaweedfs
from tests.store_contract import *  # noqa: F403

from everlong.contracts.errors import AlreadyExists, NotFound, StoreError
from everlong.contracts.ports import ObjectStore
from everlong.storage import open_store

pytestmark = [needs_seaweedfs, pytest.mark.timeout(180)]


@pytest.fixture
def store(s3_url: str) -> ObjectStore:
    return open_store(s3_url)


@pytest.fixture
def proxy(s3_url: str, s3_server: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Iterator[CuttingProxy]:
    """Between the clients and the server."""
    proxy = CuttingProxy(s3_server.s3_port)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.close()


def test_large_objects_go_up_in_parts_and_come_back_whole(store: ObjectStore) -> None:
    data = bytes(range(256)) * (130 << 10)  # 33 MB
    store.put("large", data)
    assert store.get("large") == data
    store.create("large-created", data)
    assert store.get("large-created") == data


def test_more_keys_than_a_page_holds_are_listed(store: ObjectStore) -> None:
    keys = [f"many/{number:05d}" for number in range(1005)]
    for key in keys:
        store.put(key, b"")
    assert store.list("many") == keys


def test_the_prefix_of_a_store_hides_its_neighbours(s3_url: str) -> None:
    one, longer, parent = open_store(s3_url), open_store(f"{s3_url}0"), open_store(f"{s3_url}/below")
    one.put("a", b"1")
    longer.put("b", b"2")
    parent.put("c", b"3")
    assert (one.list(""), longer.list(""), parent.list("")) == (["a", "below/c"], ["b"], ["c"])


@pytest.mark.parametrize("action", ["create", "put"])
def test_a_write_whose_answer_is_lost_is_there_once(s3_url: str, proxy: CuttingProxy, action: str) -> None:
    store, path = open_store(s3_url), s3_url.removeprefix("s3:/")
    proxy.lose_the_answer_to(f"PUT {path}/key ")
    try:
        getattr(store, action)("key", b"mine")
    except AlreadyExists:
        assert action == "create"  # the retry met the object of the first try
    assert proxy.num_lost == 1
    assert store.get("key") == b"mine"
    with pytest.raises(AlreadyExists):
        store.create("key", b"other")


def test_a_read_whose_answer_is_lost_is_asked_again(s3_url: str, proxy: CuttingProxy) -> None:
    store, path = open_store(s3_url), s3_url.removeprefix("s3:/")
    store.put("key", b"bits")
    proxy.lose_the_answer_to(f"GET {path}/key ")
    assert store.get("key") == b"bits"
    assert proxy.num_lost == 1


@pytest.mark.parametrize("action", ["create", "put", "get", "list", "delete"])
def test_a_missing_bucket_says_what_to_do(s3_url: str, action: str) -> None:
    store = open_store("s3://no-such-bucket/run")
    with pytest.raises(
        StoreError, match="cannot .* in s3://no-such-bucket/run.*does not exist there: create it"
    ) as missing:
        getattr(store, action)("key", *([b""] if action in ("create", "put") else []))
    assert not isinstance(missing.value, NotFound)


@pytest.mark.parametrize(
    ("name", "code"), [("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"), ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId")]
)
def test_wrong_credentials_are_named_and_not_repeated(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, name: str, code: str
) -> None:
    monkeypatch.setenv(name, "wrong-and-hushed")
    store = open_store(s3_url)
    for act in (lambda: store.get("a"), lambda: store.create("a", b""), lambda: store.list("")):
        with pytest.raises(
            StoreError, match=f"{code}.*refused the credentials: check those in the environment"
        ) as refusal:
            act()
        said = "".join(traceback.format_exception(refusal.value, chain=True))
        assert "wrong-and-hushed" not in said and SECRET not in said


def test_a_server_that_is_away_is_reported_after_half_a_minute(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own words hold how long it tried; the timeout of the test bounds it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match=r" in 3\d\.\d+s, after .*nobody answered there: check the endpoint"):
        open_store(f"s3://{BUCKET}/run").get("a")


def test_a_store_lives_through_a_server_that_is_killed_and_comes_back(s3_url: str, s3_server: SeaweedFS) -> None:
    store = open_store(s3_url)
    for number in range(50):
        store.create(f"acknowledged/{number:03d}", str(number).encode())
    s3_server.kill()
    s3_server.start()
    assert [store.get(key) for key in store.list("acknowledged")] == [str(number).encode() for number in range(50)]
    with pytest.raises(AlreadyExists):
        store.create("acknowledged/049", b"other")
