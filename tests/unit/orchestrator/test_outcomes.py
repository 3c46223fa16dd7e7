"""Every sampled token of an ended episode has one place, and what was discarded on the way keeps its reason."""

from everlong.contracts.errors import Reason
from everlong.contracts.records import Episode, EpisodeOrder, FinishReason, Purpose, Turn, Verdict
from everlong.contracts.tokens import TokenColumns
from everlong.ledger import (
    BatchClosed,
    BatchTrained,
    EpisodeFinished,
    EpisodeStarted,
    EpisodeState,
    GroupOpened,
    Lifecycle,
    RunStarted,
    TokensDiscarded,
    TurnSampled,
)
from everlong.orchestrator.batches import BatchMaker
from everlong.orchestrator.outcomes import eval_outcome, replaced_outcome, train_outcomes
from everlong.trajectories.admission import AdmissionConfig
from everlong.trajectories.credit import GroupMeanConfig
from everlong.trajectories.packing import PackingConfig

TURN = Turn(
    index=0,
    parent=-1,
    context=TokenColumns.context([1, 2]),
    sampled=TokenColumns.sampled_tokens([3], [-0.5], version=0),
    finish_reason=FinishReason.STOP,
)


def world(purpose):
    """Two episodes that sampled one token each; the second also lost four to an aborted call."""
    lifecycle, episodes = Lifecycle(), []
    lifecycle.apply(
        RunStarted(seed=0, config_hash="", tasks_hash=""),
        GroupOpened(purpose=purpose, group=0, task="t", content_hash="h"),
    )
    for attempt, (reward, aborted) in enumerate([(1.0, 0), (0.0, 4)]):
        order = EpisodeOrder(task="t", group=0, attempt=attempt, purpose=purpose)
        reason = Reason.AGENT_TIMEOUT if aborted else Reason.DONE
        episode = Episode(
            order=order, reason=reason, verdict=Verdict(reward=reward), turns=(TURN,), num_discarded=aborted
        )
        episodes.append(episode)
        lifecycle.apply(
            EpisodeStarted(episode=episode.id, group=0, attempt=attempt, purpose=purpose, task="t", incarnation=0),
            TurnSampled(episode=episode.id, incarnation=0, turn=0, num_tokens=1),
        )
        if aborted:
            lifecycle.apply(TokensDiscarded(episode=episode.id, incarnation=0, num_tokens=aborted, reason="aborted"))
        lifecycle.apply(
            EpisodeFinished(
                episode=episode.id,
                incarnation=0,
                reason=reason,
                reward=reward,
                num_sampled=episode.num_sampled,
                payload_key="k",
                payload_hash="h",
            )
        )
    return lifecycle, episodes


def test_a_trained_episode_keeps_the_reason_of_a_call_that_was_cut_off():
    lifecycle, episodes = world(Purpose.TRAIN)
    _, packed = BatchMaker(GroupMeanConfig(), AdmissionConfig(), PackingConfig(), 0).make(0, {0: episodes})
    ends = train_outcomes(episodes, packed.outcomes, lifecycle.episodes)
    assert [(end.trained, end.discarded) for end in ends] == [(1, {}), (1, {"aborted": 4})]
    lifecycle.apply(BatchClosed(batch=0, groups=(0,)), BatchTrained(batch=0, policy_version=1), *ends)
    assert lifecycle.balance().holds and not lifecycle.open_episodes()


def test_an_evaluated_episode_keeps_it_too():
    lifecycle, episodes = world(Purpose.EVAL)
    ends = [eval_outcome(episode, lifecycle.episodes[episode.id]) for episode in episodes]
    assert [end.discarded for end in ends] == [{"evaluated": 1}, {"evaluated": 1, "aborted": 4}]
    lifecycle.apply(*ends)
    assert {view.state for view in lifecycle.episodes.values()} == {EpisodeState.EVALUATED}


def test_a_member_of_a_replaced_group_keeps_it_too():
    lifecycle, _ = world(Purpose.TRAIN)
    ends = [replaced_outcome(view) for view in lifecycle.episodes.values()]
    assert [end.discarded for end in ends] == [{"group_replaced": 1}, {"group_replaced": 1, "aborted": 4}]
    lifecycle.apply(*ends)
    assert lifecycle.balance().holds and not lifecycle.open_episodes()
