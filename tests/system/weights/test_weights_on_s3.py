"""Versions through a real S3 server: of two writers one wins, what is read is what was published, lost answers harm nobody."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
from tests.cutting_proxy import CuttingProxy
from tests.seaweedfs import SeaweedFS, needs_seaweedfs

from everlong.contracts.errors import AlreadyExists, StaleWeights
from everlong.contracts.records import PublishedVersion
from everlong.storage import open_store
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet, fingerprint
from everlong.weights.manifest import load_manifest, version_key

pytestmark = [needs_seaweedfs, pytest.mark.timeout(180)]


def drifting(count: int, seed: int = 0) -> list[WeightSet]:
    """Versions of which each differs from the one before in a twentieth of its values."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0x3C00, 0x3E00, 20_000).astype(np.uint16)
    versions = []
    for number in range(count):
        bits = bits + (rng.random(bits.shape) < 0.05).astype(np.uint16)
        versions.append(WeightSet(number, {"w": RawTensor("bfloat16", bits.shape, bits)}))
    return versions


def publish_all(url: str, versions: list[WeightSet], anchor_every: int) -> None:
    publisher = WeightPublisher(open_store(url), anchor_every)
    for base, weights in zip([None, *versions], versions, strict=False):
        publisher.publish(weights, base)


def test_a_reader_that_follows_and_one_that_comes_late_read_every_version(s3_url: str) -> None:
    versions = drifting(9)
    following, held = WeightReader(open_store(s3_url)), None
    publisher = WeightPublisher(open_store(s3_url), anchor_every=4)
    with pytest.raises(StaleWeights, match="version 0 is not published: nothing is yet"):
        following.read(0)
    for base, weights in zip([None, *versions], versions, strict=False):
        publisher.publish(weights, base)
        assert following.latest() == weights.version
        held = following.read(weights.version, held)
        assert fingerprint(held) == fingerprint(weights)
    late = WeightReader(open_store(s3_url))
    assert [late.manifest(number).base_version for number in range(9)] == [None, 0, 1, 2, None, 4, 5, 6, None]
    assert all(fingerprint(late.read(weights.version)) == fingerprint(weights) for weights in versions)


def test_a_reader_that_fell_behind_catches_up_from_what_it_has_or_from_the_nearer_anchor(s3_url: str) -> None:
    versions, store = drifting(8), open_store(s3_url)
    publish_all(s3_url, versions, anchor_every=5)
    store.delete(load_manifest(store, 0).shards[0].key)  # type: ignore[union-attr]  # the first anchor is needed by neither
    assert fingerprint(WeightReader(store).read(4, versions[1])) == fingerprint(versions[4])
    assert fingerprint(WeightReader(store).read(7, versions[1])) == fingerprint(versions[7])


@pytest.mark.parametrize("attempt", range(5))
def test_of_two_writers_of_a_version_exactly_one_wins_and_the_other_is_told(s3_url: str, attempt: int) -> None:
    base = drifting(1)[0]
    publish_all(s3_url, [base], anchor_every=10)
    rivals = [WeightSet(1, drifting(2, seed=seed)[1].tensors) for seed in (10 + attempt, 20 + attempt)]
    ready = Barrier(2)

    def publish(weights: WeightSet) -> PublishedVersion | str:
        publisher = WeightPublisher(open_store(s3_url), anchor_every=10)
        ready.wait(60)
        try:
            return publisher.publish(weights, base)
        except AlreadyExists as error:
            return str(error)

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(publish, rivals))
    won = [weights for weights, result in zip(rivals, results, strict=True) if isinstance(result, PublishedVersion)]
    (told,) = [result for result in results if isinstance(result, str)]
    assert len(won) == 1 and "give the run its own store" in told
    assert fingerprint(WeightReader(open_store(s3_url)).read(1)) == fingerprint(won[0])


def test_a_version_whose_commit_is_not_answered_is_published_once(
    s3_url: str, s3_server: SeaweedFS, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, path = drifting(2), s3_url.removeprefix("s3:/")
    proxy = CuttingProxy(s3_server.s3_port)
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        publisher = WeightPublisher(open_store(s3_url), anchor_every=10)
        publisher.publish(versions[0], None)
        proxy.lose_the_answer_to(f"PUT {path}/{version_key(1)} ")
        published = publisher.publish(versions[1], versions[0])
        assert proxy.num_lost == 1
        assert published == WeightReader(open_store(s3_url)).manifest(1)
        assert fingerprint(WeightReader(open_store(s3_url)).read(1)) == fingerprint(versions[1])
    finally:
        proxy.close()
