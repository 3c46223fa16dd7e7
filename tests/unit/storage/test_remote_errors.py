"""A bucket's answers in our words, against a loopback server that speaks just enough HTTP."""

import os
import traceback
from collections.abc import Iterator

import pytest
from tests.fake_bucket import Bucket, fake_bucket

from everlong.contracts.errors import AlreadyExists, NotFound, StoreError
from everlong.storage import open_store


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with fake_bucket(monkeypatch) as url:
        yield url


def test_bucket_url_puts_and_gets_below_its_path(bucket: str) -> None:
    store = open_store(bucket)
    store.put("weights/a", b"bits")
    assert store.get("weights/a") == b"bits"
    assert list(Bucket.objects) == ["/bucket/run/weights/a"]


def test_bucket_errors_are_named(bucket: str) -> None:
    store = open_store(bucket)
    with pytest.raises(AlreadyExists):
        store.create("taken", b"x")
    with pytest.raises(NotFound):
        store.get("missing")
    with pytest.raises(StoreError, match="cannot get 'forbidden' in s3://bucket/run"):
        store.get("forbidden")
    store.delete("missing")


def test_a_bucket_that_is_not_there_is_no_object_that_is_not_there(bucket: str) -> None:
    store = open_store(bucket)
    for act in (lambda: store.get("lost"), lambda: store.create("lost", b"x")):
        with pytest.raises(StoreError, match="NoSuchBucket.*the bucket does not exist there: create it") as missing:
            act()
        assert not isinstance(missing.value, NotFound)


def test_a_signature_in_the_address_is_in_no_message(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Azure takes its shared signature as part of every URL, and the client prints URLs."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", os.environ["AWS_ENDPOINT_URL"])
    monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sv=2024&sig=hush")
    with pytest.raises(StoreError, match="403 Forbidden: the server refused the credentials") as refusal:
        open_store("az://bucket/run").get("forbidden")
    assert "hush" not in "".join(traceback.format_exception(refusal.value))


def test_the_environment_sets_the_connection_and_half_a_minute_of_silence_is_the_default(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_TIMEOUT", "7s")
    options = open_store(bucket)._client.client_options  # type: ignore[union-attr]
    assert {name: options[name] for name in ("timeout", "read_timeout", "allow_http")} == {
        "timeout": "7s",
        "read_timeout": "30s",
        "allow_http": "true",
    }


def test_a_create_whose_connection_breaks_under_way_is_tried_again(bucket: str) -> None:
    """The client itself repeats only what surely never arrived."""
    Bucket.breaks = 2
    open_store(bucket).create("broken", b"whole")
    assert Bucket.breaks == 0 and Bucket.objects["/bucket/run/broken"] == b"whole"
