"""Random facts, true and false: the balance holds at every step, and the state machine agrees with a plain count."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from everlong.contracts.errors import LedgerError, Reason
from everlong.contracts.records import Purpose
from everlong.ledger import (
    BatchClosed,
    BatchTrained,
    EpisodeEnded,
    EpisodeFinished,
    EpisodeInterrupted,
    EpisodeStarted,
    EpisodeState,
    EpisodeView,
    Fact,
    GroupOpened,
    Lifecycle,
    RunResumed,
    RunStarted,
    TokensDiscarded,
    TurnSampled,
)
from everlong.ledger.facts import decode_fact, encode_fact
from everlong.ledger.lifecycle import replay

PURPOSES = st.sampled_from(list(Purpose))
STATES = st.sampled_from(list(EpisodeState))
REASONS = st.sampled_from(["stale", "gone", "zero_signal"])
SMALL = st.sampled_from([-1, 0, 1, 2, 5])


# Mostly right, sometimes wrong: a random history that is never right would test refusals only.
ERROR = st.sampled_from([0, 0, 0, 0, 1])
WHICH = st.integers(0, 11)
"""Picks one of the episodes so far."""


class LedgerMachine(RuleBasedStateMachine):
    """Every fact is offered; a plain model counts those that were taken."""

    def __init__(self) -> None:
        super().__init__()
        self.lifecycle = Lifecycle()
        self.taken: list[Fact] = []
        self.offer(RunStarted(seed=0, config_hash="", tasks_hash=""))
        for purpose in Purpose:
            assert self.offer(*(GroupOpened(purpose=purpose, group=g, task="t", content_hash="") for g in range(3)))
            for group in range(2):
                self.start(purpose, group, attempt=0, incarnation=0)

    def offer(self, *facts: Fact) -> bool:
        before = dict(self.lifecycle.episodes), dict(self.lifecycle.batches), self.lifecycle.num_trained
        try:
            self.lifecycle.apply(*facts)
        except LedgerError:
            after = dict(self.lifecycle.episodes), dict(self.lifecycle.batches), self.lifecycle.num_trained
            assert after == before
            return False
        self.taken += facts
        return True

    def some(self, which: int) -> EpisodeView:
        return list(self.lifecycle.episodes.values())[which % len(self.lifecycle.episodes)]

    @rule(purpose=PURPOSES, group=st.integers(0, 3), attempt=st.integers(0, 3), incarnation=ERROR)
    def start(self, purpose: Purpose, group: int, attempt: int, incarnation: int) -> None:
        start = EpisodeStarted(
            episode=f"{purpose}-{group}-{attempt}",
            group=group,
            attempt=attempt,
            purpose=purpose,
            task="t",
            incarnation=incarnation,
        )
        taken = self.offer(start)
        assert not (taken and group == 3)

    @rule(which=WHICH, error=ERROR)
    def start_again(self, which: int, error: int) -> None:
        view = self.some(which)
        taken = self.offer(
            EpisodeStarted(
                episode=view.episode,
                group=view.group,
                attempt=view.attempt,
                purpose=view.purpose,
                task="t",
                incarnation=view.incarnation + 1 - error,
            )
        )
        assert taken <= (view.state is EpisodeState.INTERRUPTED and not error)

    @rule(which=WHICH, error=ERROR, again=ERROR, num_tokens=SMALL)
    def sample(self, which: int, error: int, again: int, num_tokens: int) -> None:
        view = self.some(which)
        turn = len(view.turns) - again
        taken = self.offer(
            TurnSampled(episode=view.episode, incarnation=view.incarnation + error, turn=turn, num_tokens=num_tokens)
        )
        allowed = view.state is EpisodeState.RUNNING and not error and not again and num_tokens >= 0
        assert taken == allowed

    @rule(which=WHICH, error=ERROR, num_tokens=SMALL, reason=REASONS)
    def discard(self, which: int, error: int, num_tokens: int, reason: str) -> None:
        view = self.some(which)
        self.offer(
            TokensDiscarded(
                episode=view.episode, incarnation=view.incarnation - error, num_tokens=num_tokens, reason=reason
            )
        )

    @rule(which=WHICH, error=ERROR)
    def interrupt(self, which: int, error: int) -> None:
        view = self.some(which)
        self.offer(EpisodeInterrupted(episode=view.episode, incarnation=view.incarnation + error))

    @rule(which=WHICH, error=ERROR, reward=st.sampled_from([None, 0.0, 1.0]))
    def finish(self, which: int, error: int, reward: float | None) -> None:
        view = self.some(which)
        taken = self.offer(
            EpisodeFinished(
                episode=view.episode,
                incarnation=view.incarnation,
                reason=Reason.DONE,
                reward=reward,
                num_sampled=view.num_sampled + error,
                payload_key="",
                payload_hash="",
            )
        )
        assert taken == (view.state is EpisodeState.RUNNING and not error)

    @rule(which=WHICH, state=STATES, error=ERROR, reason=REASONS)
    def end(self, which: int, state: EpisodeState, error: int, reason: str) -> None:
        view = self.some(which)
        discarded = dict(view.stray_tokens)
        rest = view.turn_tokens + error
        trained = rest if state is EpisodeState.TRAINED else 0
        if rest - trained:
            discarded[reason] = discarded.get(reason, 0) + rest - trained
        taken = self.offer(
            EpisodeEnded(episode=view.episode, state=state, reason=reason, trained=trained, discarded=discarded)
        )
        assert taken <= (not error and not view.state.terminal and state.terminal)

    @rule(which=WHICH, reason=REASONS)
    def train_group(self, which: int, reason: str) -> None:
        """The whole way of a finished group, so that some episodes end as trained."""
        view = self.some(which)
        if not self.lifecycle.is_finished(view.purpose, view.group):
            return
        batch = len(self.lifecycle.batches)
        if batch == self.lifecycle.num_trained and self.offer(BatchClosed(batch=batch, groups=(view.group,))):
            assert self.offer(BatchTrained(batch=batch, policy_version=batch + 1))
        stray = dict(view.stray_tokens)
        self.offer(
            EpisodeEnded(
                episode=view.episode,
                state=EpisodeState.TRAINED,
                reason=reason,
                trained=view.turn_tokens,
                discarded=stray,
            )
        )

    @rule(groups=st.sets(st.integers(0, 3), max_size=2), closes=ERROR, trains=ERROR, resumes=ERROR)
    def train_batch(self, groups: set[int], closes: int, trains: int, resumes: int) -> None:
        """The numbers go wrong by as much as the errors say."""
        if len(self.lifecycle.batches) > 3:
            return
        if resumes:
            self.offer(RunResumed(num_batches=max(0, self.lifecycle.num_trained - 1)))
        closed = self.offer(BatchClosed(batch=len(self.lifecycle.batches) + closes, groups=tuple(groups)))
        number = self.lifecycle.num_trained + trains
        trained = self.offer(BatchTrained(batch=number, policy_version=number + 1))
        assert not (closed and closes) and not (trained and trains)

    @invariant()
    def balance_holds(self) -> None:
        balance = self.lifecycle.balance()
        assert balance.holds, balance

    @invariant()
    def balance_agrees_with_a_plain_count(self) -> None:
        balance = self.lifecycle.balance()
        ends = [fact for fact in self.taken if isinstance(fact, EpisodeEnded)]
        assert len({fact.episode for fact in ends}) == len(ends)
        assert balance.offered == len({f.episode for f in self.taken if isinstance(f, EpisodeStarted)})
        assert sum(balance.open.values()) == balance.offered - len(ends)
        assert balance.tokens_trained == sum(fact.trained for fact in ends)
        sampled = sum(f.num_tokens for f in self.taken if isinstance(f, TurnSampled | TokensDiscarded))
        assert balance.tokens_sampled == sampled

    def teardown(self) -> None:
        again = replay(decode_fact(encode_fact(fact)) for fact in self.taken)
        assert dict(again.episodes) == dict(self.lifecycle.episodes)
        assert dict(again.groups) == dict(self.lifecycle.groups)
        assert again.policy_version == self.lifecycle.policy_version


LedgerMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=50, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
