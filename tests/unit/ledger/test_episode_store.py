"""Episodes in the object store come back exactly, or not at all."""

import numpy as np
import pytest

from everlong.contracts.errors import LedgerError, Reason
from everlong.contracts.records import Episode, EpisodeOrder, FinishReason, Purpose, Turn, Verdict
from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.ledger import EpisodeStore
from everlong.storage import ObstoreStore, open_store


@pytest.fixture
def store() -> ObstoreStore:
    return open_store("memory://")


def episode(incarnation: int = 0, reward: float = 1.0) -> Episode:
    sampled = TokenColumns.sampled_tokens(
        [5, 6, 7], np.float32([-0.1, -2.5, -1e-7]), version=4, kept=KeptSets.from_rows([[5, 9], [], [7]])
    )
    turn = Turn(
        index=0,
        parent=-1,
        context=TokenColumns.context([1, 2]),
        sampled=sampled,
        finish_reason=FinishReason.STOP,
    )
    order = EpisodeOrder(task="count", group=4, attempt=2, purpose=Purpose.TRAIN, incarnation=incarnation)
    return Episode(order=order, reason=Reason.DONE, verdict=Verdict(reward=reward), turns=(turn,), num_discarded=2)


def test_round_trip_keeps_ids_logprobs_versions_and_kept_sets(store: ObstoreStore) -> None:
    episodes = EpisodeStore(store)
    key, digest = episodes.put(episode(), 0)
    assert key == "episodes/train-000004-002/000"
    read = episodes.get(key, digest)
    assert read.order == episode().order and read.verdict.reward == 1.0 and read.num_sampled == 5
    assert read.turns[0].context == episode().turns[0].context
    assert read.turns[0].sampled == episode().turns[0].sampled
    assert read.turns[0].sampled.kept.row(0).tolist() == [5, 9]


def test_putting_the_same_again_is_no_change(store: ObstoreStore) -> None:
    episodes = EpisodeStore(store)
    assert episodes.put(episode(), 0) == episodes.put(episode(), 0)
    assert len(store.list("")) == 1


def test_incarnations_lie_apart(store: ObstoreStore) -> None:
    episodes = EpisodeStore(store)
    first, second = episodes.put(episode(0), 0), episodes.put(episode(1, reward=0.0), 1)
    assert first.key != second.key
    assert episodes.get(*first).reward == 1.0 and episodes.get(*second).reward == 0.0


def test_other_episode_under_the_same_key_is_refused(store: ObstoreStore) -> None:
    episodes = EpisodeStore(store)
    first = episodes.put(episode(), 0)
    with pytest.raises(LedgerError, match="it is another or damaged"):
        episodes.put(episode(reward=0.0), 0)
    assert episodes.get(*first).reward == 1.0


def test_order_and_incarnation_must_agree(store: ObstoreStore) -> None:
    with pytest.raises(LedgerError, match="was ordered as incarnation 0, stored as 1"):
        EpisodeStore(store).put(episode(0), 1)


def test_lost_damaged_or_wrong_episode_is_a_ledger_error(store: ObstoreStore) -> None:
    episodes = EpisodeStore(store)
    key, digest = episodes.put(episode(), 0)
    with pytest.raises(LedgerError, match="expected 00"):
        episodes.get(key, "00")
    store.put(key, store.get(key)[:-4])
    with pytest.raises(LedgerError, match="is damaged"):
        episodes.get(key, digest)
    store.delete(key)
    with pytest.raises(LedgerError, match="the store has none"):
        episodes.get(key, digest)
