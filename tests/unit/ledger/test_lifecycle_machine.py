"""Random facts, true and false: the balance holds at every step, and the state machine agrees with a plain count."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

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
SMALL = st.integers(-1, 4)


class LedgerMachine(RuleBasedStateMachine):
    """Every fact is offered; a plain model counts those that were taken."""

    episodes = Bundle("episodes")

    def __init__(self) -> None:
        super().__init__()
        self.lifecycle = Lifecycle()
        self.taken: list[Fact] = []
        self.offer(RunStarted(seed=0, config_hash="", tasks_hash=""))

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

    @initialize()
    def open_groups(self) -> None:
        for purpose in Purpose:
            assert self.offer(*(GroupOpened(purpose=purpose, group=g, task="t", content_hash="") for g in range(3)))

    @rule(
        target=episodes, purpose=PURPOSES, group=st.integers(0, 3), attempt=st.integers(0, 3), number=st.integers(0, 9)
    )
    def start(self, purpose: Purpose, group: int, attempt: int, number: int) -> str:
        episode = f"{purpose}-{number}"
        known = self.lifecycle.episodes.get(episode)
        incarnation = 0 if known is None else known.incarnation + 1
        self.offer(
            EpisodeStarted(
                episode=episode, group=group, attempt=attempt, purpose=purpose, task="t", incarnation=incarnation
            )
        )
        return episode

    @rule(episode=episodes)
    def start_again(self, episode: str) -> None:
        known = self.lifecycle.episodes.get(episode)
        if known is not None:
            self.offer(
                EpisodeStarted(
                    episode=episode,
                    group=known.group,
                    attempt=known.attempt,
                    purpose=known.purpose,
                    task="t",
                    incarnation=known.incarnation + 1,
                )
            )

    @rule(episode=episodes, incarnation=st.integers(0, 1), turn=st.integers(0, 5), num_tokens=SMALL)
    def sample(self, episode: str, incarnation: int, turn: int, num_tokens: int) -> None:
        self.offer(TurnSampled(episode=episode, incarnation=incarnation, turn=turn, num_tokens=num_tokens))

    @rule(episode=episodes, incarnation=st.integers(0, 1), num_tokens=SMALL, reason=REASONS)
    def discard(self, episode: str, incarnation: int, num_tokens: int, reason: str) -> None:
        self.offer(TokensDiscarded(episode=episode, incarnation=incarnation, num_tokens=num_tokens, reason=reason))

    @rule(episode=episodes, incarnation=st.integers(0, 1))
    def interrupt(self, episode: str, incarnation: int) -> None:
        self.offer(EpisodeInterrupted(episode=episode, incarnation=incarnation))

    @rule(episode=episodes, error=st.sampled_from([0, 0, 0, 1]), reward=st.sampled_from([None, 0.0, 1.0]))
    def finish(self, episode: str, error: int, reward: float | None) -> None:
        known = self.lifecycle.episodes.get(episode)
        taken = self.offer(
            EpisodeFinished(
                episode=episode,
                incarnation=0 if known is None else known.incarnation,
                reason=Reason.DONE,
                reward=reward,
                num_sampled=(0 if known is None else known.num_sampled) + error,
                payload_key="",
                payload_hash="",
            )
        )
        assert not (taken and error)

    @rule(episode=episodes, state=STATES, error=st.sampled_from([0, 0, 0, 1]), reason=REASONS)
    def end(self, episode: str, state: EpisodeState, error: int, reason: str) -> None:
        known = self.lifecycle.episodes.get(episode)
        stray = {} if known is None else dict(known.stray_tokens)
        rest = (0 if known is None else known.turn_tokens) + error
        trained = rest if state is EpisodeState.TRAINED else 0
        if rest - trained:
            stray[reason] = stray.get(reason, 0) + rest - trained
        taken = self.offer(EpisodeEnded(episode=episode, state=state, reason=reason, trained=trained, discarded=stray))
        assert not (taken and error)

    @rule(episode=consumes(episodes), state=STATES)
    def end_twice(self, episode: str, state: EpisodeState) -> None:
        known = self.lifecycle.episodes.get(episode)
        if known is not None and known.state.terminal:
            assert not self.offer(EpisodeEnded(episode=episode, state=state, reason="x", trained=0, discarded={}))

    @rule(groups=st.sets(st.integers(0, 3), max_size=2), ahead=st.sampled_from([0, 0, 1]))
    def close_batch(self, groups: set[int], ahead: int) -> None:
        number = len(self.lifecycle.batches) + ahead
        taken = self.offer(BatchClosed(batch=number, groups=tuple(groups)))
        assert not (taken and ahead)

    @rule(ahead=st.sampled_from([0, 0, 1]))
    def train_batch(self, ahead: int) -> None:
        number = self.lifecycle.num_trained + ahead
        taken = self.offer(BatchTrained(batch=number, policy_version=number + 1))
        assert not (taken and ahead)

    @rule(num_batches=st.integers(0, 3))
    def resume(self, num_batches: int) -> None:
        self.offer(RunResumed(num_batches=num_batches))

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


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase
