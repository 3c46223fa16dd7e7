"""What the ledger refuses, and what it counts."""

from collections.abc import Sequence

import msgspec
import pytest

from everlong.contracts.errors import LedgerError, Reason
from everlong.contracts.records import MemberState, Purpose
from everlong.ledger import (
    BatchClosed,
    BatchTrained,
    CallUncounted,
    EngineChanged,
    EngineUpdated,
    EpisodeEnded,
    EpisodeFinished,
    EpisodeInterrupted,
    EpisodeStarted,
    EpisodeState,
    EvalFinished,
    Fact,
    GroupOpened,
    Lifecycle,
    RunFinished,
    RunResumed,
    RunStarted,
    TokensDiscarded,
    TurnSampled,
    VersionPublished,
)

RUN = RunStarted(seed=0, config_hash="c", tasks_hash="t")


def quarantined(state: MemberState = MemberState.QUARANTINED) -> EngineChanged:
    return EngineChanged(engine="0-vllm", state=state, mismatch=0.5, num_measured=1000, reason="far")


def opened(group: int = 0, purpose: Purpose = Purpose.TRAIN) -> GroupOpened:
    return GroupOpened(purpose=purpose, group=group, task="count", content_hash="h")


def started(
    episode: str = "e", attempt: int = 0, incarnation: int = 0, group: int = 0, purpose: Purpose = Purpose.TRAIN
) -> EpisodeStarted:
    return EpisodeStarted(
        episode=episode, group=group, attempt=attempt, purpose=purpose, task="count", incarnation=incarnation
    )


def turn(num_tokens: int, index: int = 0, episode: str = "e", incarnation: int = 0) -> TurnSampled:
    return TurnSampled(episode=episode, incarnation=incarnation, turn=index, num_tokens=num_tokens)


def stray(num_tokens: int, reason: str = "client_gone", episode: str = "e", incarnation: int = 0) -> TokensDiscarded:
    return TokensDiscarded(episode=episode, incarnation=incarnation, num_tokens=num_tokens, reason=reason)


def finished(
    num_sampled: int,
    reward: float | None = 1.0,
    reason: Reason = Reason.DONE,
    episode: str = "e",
    incarnation: int = 0,
) -> EpisodeFinished:
    return EpisodeFinished(
        episode=episode,
        incarnation=incarnation,
        reason=reason,
        reward=reward,
        num_sampled=num_sampled,
        payload_key="k",
        payload_hash="h",
    )


def ended(
    state: EpisodeState, trained: int = 0, discarded: dict[str, int] | None = None, episode: str = "e"
) -> EpisodeEnded:
    return EpisodeEnded(episode=episode, state=state, reason=f"{state}!", trained=trained, discarded=discarded or {})


def batch(number: int = 0, *groups: int) -> tuple[BatchClosed, BatchTrained]:
    return BatchClosed(batch=number, groups=groups), BatchTrained(batch=number, policy_version=number + 1)


def after(*facts: Fact) -> Lifecycle:
    lifecycle = Lifecycle()
    for fact in (RUN, *facts):
        lifecycle.apply(fact)
    return lifecycle


FINISHED: tuple[Fact, ...] = (opened(), started(), turn(5), stray(2), finished(7))
TRAINED = (*FINISHED, *batch(0, 0), ended(EpisodeState.TRAINED, 5, {"client_gone": 2}))
EVALUATED = (
    opened(purpose=Purpose.EVAL),
    started(purpose=Purpose.EVAL),
    turn(5),
    finished(5),
    ended(EpisodeState.EVALUATED, 0, {"evaluation": 5}),
)


@pytest.mark.parametrize(
    ("facts", "refused", "message"),
    [
        ((), RUN, "the run started already"),
        ((), started(), "before its train group 0 was opened"),
        ((opened(),), opened(), "train group 0 was opened already"),
        ((), turn(1), "e got a TurnSampled without a start"),
        ((), finished(0), "e got a EpisodeFinished without a start"),
        ((), ended(EpisodeState.FAILED), "e ended without a start"),
        ((opened(),), started(incarnation=1), "starts with incarnation 1, expected 0"),
        ((opened(), started()), started(), "started again while it is running"),
        ((opened(), started()), started("f"), "claims attempt 0 of its group, which is e"),
        ((opened(), started(), turn(3)), turn(3), "turn 0 of e was sampled already"),
        ((opened(), started()), turn(3, incarnation=1), "of incarnation 1, running is 0"),
        ((opened(), started()), turn(-3), "negative count"),
        ((opened(), started()), stray(3, reason=""), "discards 3 tokens without a reason"),
        ((opened(), started(), turn(5), stray(2)), finished(5), "with 5 sampled tokens, .* sum to 7"),
        ((opened(), started()), finished(0, 0.0, Reason.SANDBOX_CRASH), "sandbox_crash, which can have no reward"),
        ((opened(), started()), finished(0, float("nan")), "not finite"),
        (FINISHED, finished(7), "got a EpisodeFinished while it is finished"),
        (FINISHED, turn(1, 1), "got a TurnSampled while it is finished"),
        (FINISHED, EpisodeInterrupted(episode="e", incarnation=0), "while it is finished"),
        (FINISHED, ended(EpisodeState.RUNNING, 0, {"x": 7}), "cannot end as running"),
        (FINISHED, ended(EpisodeState.DISCARDED, 0, {"x": 6}), "6 in all, but sampled 7"),
        (FINISHED, ended(EpisodeState.DISCARDED, 0, {"x": 7}), r"leave out earlier ones: {'client_gone': 2}"),
        (FINISHED, ended(EpisodeState.DISCARDED, 5, {"client_gone": 2}), "with 5 tokens trained, expected 0"),
        (FINISHED, ended(EpisodeState.DISCARDED, -1, {"client_gone": 8}), "negative token count"),
        (FINISHED, ended(EpisodeState.TRAINED, 5, {"client_gone": 2}), "in no batch that was trained"),
        (FINISHED, ended(EpisodeState.EVALUATED, 0, {"client_gone": 2, "x": 5}), "is for training"),
        ((*FINISHED, *batch(0, 0)), ended(EpisodeState.TRAINED, 0, {"client_gone": 7}), "without a trained token"),
        ((*FINISHED, batch(0, 0)[0]), ended(EpisodeState.TRAINED, 5, {"client_gone": 2}), "no batch that was"),
        ((opened(), started()), ended(EpisodeState.DISCARDED), "is running and cannot end as discarded"),
        (TRAINED, ended(EpisodeState.FAILED, 0, {"client_gone": 7}), "ended after its end as trained"),
        (TRAINED, turn(1, 1), "got a TurnSampled after its end as trained"),
        (EVALUATED, ended(EpisodeState.EVALUATED), "ended after its end as evaluated"),
        (EVALUATED[:3], ended(EpisodeState.EVALUATED, 0, {"x": 5}), "it has not finished"),
        (
            (*EVALUATED[:3], finished(5, None, Reason.VERIFIER_CRASH)),
            ended(EpisodeState.EVALUATED, 0, {"x": 5}),
            "has no verdict",
        ),
        ((), BatchClosed(batch=1, groups=()), "batch 1 closed out of order, expected batch 0"),
        (batch(0), BatchClosed(batch=0, groups=()), "batch 0 closed out of order, expected batch 1"),
        ((), BatchTrained(batch=0, policy_version=1), "batch 0 was trained before it closed"),
        (batch(0), BatchTrained(batch=0, policy_version=2), "batch 0 trained out of order, expected batch 1"),
        ((batch()[0],), BatchTrained(batch=0, policy_version=2), "policy version 2, expected 1"),
        ((), BatchClosed(batch=0, groups=(4,)), "names group 4, which was never opened"),
        ((opened(), started()), BatchClosed(batch=0, groups=(0,)), "has episodes that are not finished"),
        (FINISHED, BatchClosed(batch=0, groups=(0, 0)), "names a group twice"),
        (TRAINED, BatchClosed(batch=1, groups=(0,)), "names group 0, which batch 0 holds"),
        (TRAINED, started("f", 1), "started after batch 0 closed over its group"),
        (
            (),
            VersionPublished(version=1, base_version=None, size_bytes=1),
            "version 1 was published, the policy is at 0",
        ),
        (batch(), VersionPublished(version=1, base_version=1, size_bytes=1), "on base 1, which is not older"),
        (batch(), EngineUpdated(version=1), "the newest published one is None"),
        ((quarantined(),), quarantined(MemberState.SERVING), "0-vllm is serving after it was quarantined"),
        (batch(), EvalFinished(index=0, policy_version=1, successes=3, episodes=2), "3 successes in 2 episodes"),
        (batch(), RunResumed(num_batches=2), "resumes with 2 trained batches, the ledger knows 1"),
        ((opened(), started()), RunFinished(), "1 episodes have no end"),
        ((RunFinished(),), opened(), "GroupOpened came after RunFinished: resume"),
    ],
)
def test_contradiction_is_refused_and_leaves_nothing_behind(facts: Sequence[Fact], refused: Fact, message: str) -> None:
    lifecycle = after(*facts)
    before = _state(lifecycle)
    with pytest.raises(LedgerError, match=message):
        lifecycle.apply(refused)
    assert _state(lifecycle) == before


def _state(lifecycle: Lifecycle) -> tuple[object, ...]:
    return (
        dict(lifecycle.episodes),
        dict(lifecycle.groups),
        dict(lifecycle.batches),
        dict(lifecycle.evals),
        lifecycle.num_trained,
        lifecycle.finished,
        lifecycle.published_version,
    )


def test_nothing_comes_before_the_run_starts() -> None:
    with pytest.raises(LedgerError, match="GroupOpened came before RunStarted"):
        Lifecycle().apply(opened())


def test_facts_handed_over_together_are_taken_together_or_not_at_all() -> None:
    lifecycle = after(opened())
    with pytest.raises(LedgerError, match="sum to 5"):
        lifecycle.apply(started(), turn(5), finished(6))
    assert "e" not in lifecycle.episodes and lifecycle.groups[Purpose.TRAIN, 0].episodes == ()
    lifecycle.apply(started(), turn(5), finished(5))
    assert lifecycle.episodes["e"].state is EpisodeState.FINISHED


def test_a_resumed_run_takes_a_quarantined_engine_in_again() -> None:
    lifecycle = after(quarantined(), RunResumed())
    lifecycle.apply(quarantined(MemberState.SERVING), quarantined())


def test_trained_episode_accounts_for_every_token() -> None:
    lifecycle = after(*TRAINED)
    balance = lifecycle.balance()
    assert balance.ended == {"trained": {"trained!": 1}} and balance.open == {}
    assert (balance.tokens_sampled, balance.tokens_trained) == (7, 5)
    assert balance.tokens_discarded == {"client_gone": 2} and balance.holds
    assert lifecycle.policy_version == 1 and lifecycle.groups[Purpose.TRAIN, 0].batch == 0


def test_interrupted_attempt_starts_again_and_its_tokens_end_as_discarded() -> None:
    lifecycle = after(
        opened(),
        started(),
        turn(5),
        stray(2),
        EpisodeInterrupted(episode="e", incarnation=0),
        started(incarnation=1),
        turn(4, incarnation=1),
        finished(4, incarnation=1),
        *batch(0, 0),
        ended(EpisodeState.TRAINED, 4),
    )
    balance = lifecycle.balance()
    assert balance.offered == 1 and balance.tokens_sampled == 11
    assert balance.tokens_trained == 4 and balance.tokens_discarded == {"client_gone": 2, "interrupted": 5}
    assert balance.holds


def test_interrupted_attempt_that_never_starts_again_is_cancelled_with_no_tokens_left() -> None:
    lifecycle = after(
        opened(), started(), turn(5), EpisodeInterrupted(episode="e", incarnation=0), ended(EpisodeState.CANCELLED)
    )
    assert lifecycle.balance().tokens_discarded == {"interrupted": 5}
    lifecycle.apply(RunFinished())


def test_dead_process_cannot_write_into_the_next_incarnation() -> None:
    lifecycle = after(opened(), started(), EpisodeInterrupted(episode="e", incarnation=0), started(incarnation=1))
    with pytest.raises(LedgerError, match="of incarnation 0, running is 1: a process that should be dead"):
        lifecycle.apply(turn(3))


@pytest.mark.parametrize("state", [EpisodeState.FAILED, EpisodeState.CANCELLED])
def test_running_episode_may_fail_or_be_cancelled_without_finishing(state: EpisodeState) -> None:
    lifecycle = after(opened(), started(), turn(5), ended(state, 0, {"lost": 5}))
    assert lifecycle.balance().ended == {state: {f"{state}!": 1}} and lifecycle.balance().holds


def test_group_of_an_ended_and_a_finished_episode_is_finished() -> None:
    lifecycle = after(opened(), started(), started("f", 1), turn(5), finished(5))
    assert not lifecycle.is_finished(Purpose.TRAIN, 0)
    lifecycle.apply(ended(EpisodeState.FAILED, episode="f"))
    assert lifecycle.is_finished(Purpose.TRAIN, 0)
    lifecycle.apply(BatchClosed(batch=0, groups=(0,)))


def test_same_numbers_for_training_and_evaluation_groups_do_not_collide() -> None:
    lifecycle = after(
        opened(), started(), opened(purpose=Purpose.EVAL), started("v", purpose=Purpose.EVAL), turn(3, episode="v")
    )
    assert lifecycle.groups[Purpose.TRAIN, 0].episodes == ("e",)
    assert lifecycle.groups[Purpose.EVAL, 0].episodes == ("v",)


def test_run_that_resumes_from_an_older_checkpoint_trains_its_batches_again() -> None:
    lifecycle = after(*TRAINED, *batch(1), VersionPublished(version=2, base_version=1, size_bytes=9))
    lifecycle.apply(RunResumed(num_batches=0))
    assert (lifecycle.num_trained, lifecycle.policy_version) == (0, 0)
    with pytest.raises(LedgerError, match="batch 1 trained out of order, expected batch 0"):
        lifecycle.apply(BatchTrained(batch=1, policy_version=2))
    lifecycle.apply(BatchTrained(batch=0, policy_version=1), BatchTrained(batch=1, policy_version=2), *batch(2))
    assert lifecycle.policy_version == 3
    assert lifecycle.episodes["e"].state is EpisodeState.TRAINED and lifecycle.balance().tokens_trained == 5


def test_finished_run_takes_facts_again_after_a_resume() -> None:
    lifecycle = after(RunFinished(), RunResumed(), opened())
    assert not lifecycle.finished and (Purpose.TRAIN, 0) in lifecycle.groups


def test_failures_are_counted_by_reason_and_never_become_rewards() -> None:
    """Every third verifier crashes: the run goes on and the identity holds at every step."""
    lifecycle = after(opened())
    for number in range(9):
        name, crashed = f"e{number}", number % 3 == 2
        reason, reward = (Reason.VERIFIER_CRASH, None) if crashed else (Reason.DONE, 1.0)
        state = EpisodeState.FAILED if crashed else EpisodeState.DISCARDED
        for fact in (
            started(name, number),
            turn(2, episode=name),
            finished(2, reward, reason, episode=name),
            EpisodeEnded(episode=name, state=state, reason=reason, trained=0, discarded={reason: 2}),
        ):
            lifecycle.apply(fact)
            assert lifecycle.balance().holds
    balance = lifecycle.balance()
    assert balance.ended == {"discarded": {"done": 6}, "failed": {"verifier_crash": 3}}
    assert balance.tokens_discarded == {"done": 12, "verifier_crash": 6}


def test_losses_of_the_longest_episodes_show_in_the_last_decile() -> None:
    lifecycle = after(opened())
    for number in range(20):
        name, lost = f"e{number}", number in (3, 18, 19)
        state = EpisodeState.FAILED if lost else EpisodeState.DISCARDED
        lifecycle.apply(started(name, number), turn(10 * (number + 1), episode=name))
        lifecycle.apply(finished(10 * (number + 1), episode=name))
        lifecycle.apply(ended(state, 0, {"x": 10 * (number + 1)}, episode=name))
    deciles = lifecycle.loss_by_length_decile()
    assert [decile.lost for decile in deciles] == [0, 1, 0, 0, 0, 0, 0, 0, 0, 2]
    assert [decile.episodes for decile in deciles] == [2] * 10
    assert (deciles[-1].min_tokens, deciles[-1].max_tokens, deciles[-1].loss_rate) == (190, 200, 1.0)


def test_tokens_that_were_too_old_show_in_the_decile_of_their_length() -> None:
    lifecycle = after(opened())
    for number in range(10):
        name, length = f"e{number}", 10 * (number + 1)
        old = {"over_age": 75} if number == 9 else {}
        lifecycle.apply(started(name, number), turn(length, episode=name), finished(length, episode=name))
        lifecycle.apply(ended(EpisodeState.DISCARDED, 0, {**old, "x": length - sum(old.values())}, episode=name))
    deciles = lifecycle.loss_by_length_decile()
    assert [decile.over_age for decile in deciles] == [0] * 9 + [75]
    assert (deciles[-1].tokens, deciles[-1].over_age_rate, deciles[-1].lost) == (100, 0.75, 0)


def test_a_group_knows_what_the_engine_held_when_it_was_opened() -> None:
    lifecycle = after(VersionPublished(version=0, base_version=None, size_bytes=1), EngineUpdated(version=0), *TRAINED)
    version = lifecycle.policy_version
    lifecycle.apply(VersionPublished(version=version, base_version=0, size_bytes=1), EngineUpdated(version=version))
    lifecycle.apply(GroupOpened(purpose=Purpose.TRAIN, group=77, task="t", content_hash="h"))
    assert version == 1
    assert [
        lifecycle.groups[Purpose.TRAIN, group].engine_version for group in (min(g for _, g in lifecycle.groups), 77)
    ] == [0, 1]


def test_calls_that_nobody_counted_and_signs_of_cheating_stand_in_the_balance() -> None:
    uncounted = CallUncounted(episode="e", incarnation=0, max_tokens=64, reason="engine_silent")
    again = msgspec.structs.replace(uncounted, incarnation=1)
    flagged = msgspec.structs.replace(finished(3, incarnation=1), flags=("verdict_preexisting",))
    lost = EpisodeInterrupted(episode="e", incarnation=0)
    lifecycle = after(
        opened(), started(), uncounted, lost, started(incarnation=1), again, turn(3, incarnation=1), flagged
    )
    balance = lifecycle.balance()
    assert (balance.calls_uncounted, balance.flags, balance.holds) == (2, {"verdict_preexisting": 1}, True)
    assert balance.tables()["tokens"]["not counted: model calls"] == 2
    assert balance.tables()["flags"] == {"verdict_preexisting": 1}
    assert after().balance().tables().keys() == {"episodes", "tokens"}
    with pytest.raises(LedgerError, match="got a CallUncounted while it is finished"):
        lifecycle.apply(again)


def test_few_episodes_make_few_deciles() -> None:
    assert after().loss_by_length_decile() == []
    assert [decile.episodes for decile in after(*TRAINED).loss_by_length_decile()] == [1]
