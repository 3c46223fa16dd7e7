"""What a resumed run reads from the ledger: nothing skipped, nothing sampled twice, no episode left without an end."""

from everlong.contracts.errors import Reason
from everlong.contracts.records import EpisodeOrder, Purpose
from everlong.ledger import (
    BatchClosed,
    BatchTrained,
    EngineUpdated,
    EpisodeEnded,
    EpisodeFinished,
    EpisodeStarted,
    EpisodeState,
    GroupOpened,
    Lifecycle,
    RunStarted,
    TurnSampled,
    VersionPublished,
)
from everlong.orchestrator.recovery import interruptions, progress_of


def name(group, attempt=0):
    return EpisodeOrder(task="t", group=group, attempt=attempt, purpose=Purpose.TRAIN).episode


def open_group(group):
    return [
        GroupOpened(purpose=Purpose.TRAIN, group=group, task="t", content_hash="h"),
        start(group),
    ]


def start(group, attempt=0, incarnation=0):
    return EpisodeStarted(
        episode=name(group, attempt),
        group=group,
        attempt=attempt,
        purpose=Purpose.TRAIN,
        task="t",
        incarnation=incarnation,
    )


def finish(group, attempt=0, incarnation=0, tokens=5):
    return [
        TurnSampled(episode=name(group, attempt), incarnation=incarnation, turn=0, num_tokens=tokens),
        EpisodeFinished(
            episode=name(group, attempt),
            incarnation=incarnation,
            reason=Reason.DONE,
            reward=1.0,
            num_sampled=tokens,
            payload_key="k",
            payload_hash="h",
        ),
    ]


def ended(group, state=EpisodeState.TRAINED, trained=5, discarded=None):
    return EpisodeEnded(episode=name(group), state=state, reason="done", trained=trained, discarded=discarded or {})


def trained_batch(batch, groups):
    return [
        BatchClosed(batch=batch, groups=tuple(groups)),
        BatchTrained(batch=batch, policy_version=batch + 1),
        *(ended(group) for group in groups),
    ]


def ledger(*facts):
    lifecycle = Lifecycle()
    lifecycle.apply(RunStarted(seed=0, config_hash="", tasks_hash=""), *facts)
    return lifecycle


def mid_run():
    """Groups 0 to 3 trained, 5 finished and unused, 4, 6 and 7 in flight."""
    facts = [fact for group in range(8) for fact in open_group(group)]
    facts += [fact for group in (0, 1, 2, 3, 5) for fact in finish(group)]
    return ledger(*facts, *trained_batch(0, range(4)))


def test_the_finished_and_unused_group_is_kept_and_those_in_flight_start_again():
    lifecycle = mid_run()
    lifecycle.apply(*interruptions(lifecycle))
    progress = progress_of(lifecycle)
    assert progress.num_batches == 1 and progress.closed_groups is None
    assert progress.consumed == {0, 1, 2, 3}
    assert name(5) in progress.ended
    assert progress.incarnations == {name(group): 1 for group in (4, 6, 7)}


def test_groups_that_were_opened_and_are_in_no_batch_are_named_with_the_version_the_engine_held():
    lifecycle = mid_run()
    lifecycle.apply(VersionPublished(version=1, base_version=None, size_bytes=1), EngineUpdated(version=1))
    lifecycle.apply(*open_group(8))
    lifecycle.apply(ended(5, EpisodeState.CANCELLED, trained=0, discarded={"group_replaced": 5}))
    lifecycle.apply(*interruptions(lifecycle))
    assert progress_of(lifecycle).open_groups == {4: 0, 6: 0, 7: 0, 8: 1}
    lifecycle.apply(start(4, incarnation=1), *finish(4, incarnation=1), BatchClosed(batch=1, groups=(4,)))
    assert progress_of(lifecycle).open_groups == {6: 0, 7: 0, 8: 1}, "a closed batch is told apart"


def test_interruptions_account_for_what_the_lost_attempts_had_sampled():
    lifecycle = mid_run()
    lifecycle.apply(TurnSampled(episode=name(4), incarnation=0, turn=0, num_tokens=7))
    lifecycle.apply(*interruptions(lifecycle))
    balance = lifecycle.balance()
    assert balance.tokens_discarded == {"interrupted": 7} and balance.holds
    assert interruptions(lifecycle) == [], "recorded once"


def test_a_batch_that_was_closed_and_not_trained_is_named_with_its_groups():
    lifecycle = mid_run()
    lifecycle.apply(*finish(4))
    lifecycle.apply(BatchClosed(batch=1, groups=(4, 5)))
    lifecycle.apply(*interruptions(lifecycle))
    progress = progress_of(lifecycle)
    assert progress.closed_groups == (4, 5) and progress.num_batches == 1
    assert progress.consumed == {0, 1, 2, 3}


def test_members_of_a_replaced_group_end_with_it_and_the_group_is_not_served_again():
    lifecycle = mid_run()
    lifecycle.apply(start(5, attempt=1))
    lifecycle.apply(ended(5, EpisodeState.CANCELLED, trained=0, discarded={"group_replaced": 5}))
    lifecycle.apply(*interruptions(lifecycle))
    assert lifecycle.episodes[name(5, 1)].state is EpisodeState.CANCELLED
    assert 5 in progress_of(lifecycle).consumed
    assert progress_of(lifecycle).num_replaced == 1, "of the batch under way"
    assert lifecycle.balance().holds


def test_what_a_closed_batch_replaced_is_not_counted_to_the_next():
    lifecycle = mid_run()
    lifecycle.apply(ended(5, EpisodeState.CANCELLED, trained=0, discarded={"group_replaced": 5}))
    for group in (4, 6, 7):
        lifecycle.apply(*finish(group))
    lifecycle.apply(BatchClosed(batch=1, groups=(4, 6, 7)))
    assert progress_of(lifecycle).num_replaced == 0


def test_an_empty_ledger_is_a_run_at_its_beginning():
    progress = progress_of(ledger())
    assert progress.num_batches == 0 and not progress.consumed and not progress.ended
