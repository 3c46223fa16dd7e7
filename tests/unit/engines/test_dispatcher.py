"""Who takes a request of a pool, and who is trusted."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from everlong.contracts.records import EngineMismatch, MemberState
from everlong.engines.pool.dispatcher import MAX_FAILURES, Dispatcher
from everlong.engines.pool.events import (
    Answered,
    Asked,
    Broke,
    Measured,
    Refuse,
    Send,
    Update,
    Updated,
    UpdateFailed,
    VersionWanted,
    Withdrawn,
)


def dispatcher(*slots, bound=0.1, tokens=100):
    return Dispatcher([f"e{i}" for i in range(len(slots))], slots, mismatch_bound=bound, mismatch_tokens=tokens)


def serving(*slots, version=1, **settings):
    pool = dispatcher(*slots, **settings)
    pool.on_event(VersionWanted(version))
    for engine in range(len(slots)):
        pool.on_event(Updated(engine, version, 0.0))
    return pool


def ask(pool, ticket, episode=None, min_policy_version=0, at_s=0.0):
    """Where the request goes; None where it waits, "refused" where nobody will take it."""
    actions = pool.on_event(Asked(ticket, episode or f"episode {ticket}", min_policy_version, at_s))
    assert len(actions) <= 1
    return where(actions[0]) if actions else None


def where(action):
    return action.engine if isinstance(action, Send) else "refused"


def measured(*parts):
    mismatch = (EngineMismatch(engine=e, age=a, num_tokens=n, total=n * mean) for e, a, n, mean in parts)
    return Measured(tuple(mismatch), at_s=0.0)


def states(pool):
    return [member.state for member in pool.members()]


def test_requests_go_by_the_number_of_slots_until_speeds_are_known():
    pool = serving(6, 2)
    assert sorted(ask(pool, ticket) for ticket in range(8)) == [0] * 6 + [1] * 2


def test_an_engine_that_is_three_times_as_fast_gets_three_quarters_of_the_requests():
    pool = serving(64, 64)
    assert [ask(pool, ticket) for ticket in (100, 101)] == [0, 1]
    pool.on_event(Answered(100, num_tokens=300, at_s=10.0))
    pool.on_event(Answered(101, num_tokens=100, at_s=10.0))
    assert pool.speeds == {"e0": 30.0, "e1": 10.0}
    assert [ask(pool, ticket, at_s=10.0) for ticket in range(40)].count(0) == 30


def test_an_engine_that_was_slow_once_or_never_measured_gets_one_turn_after_every_update():
    """Else it would get nothing while the others have free slots, and nobody would see how fast it is."""
    pool = serving(64, 64, 1)
    assert [ask(pool, ticket) for ticket in (100, 101)] == [0, 1]
    pool.on_event(Answered(100, num_tokens=300, at_s=1.0))
    pool.on_event(Answered(101, num_tokens=3, at_s=100.0))
    assert [ask(pool, ticket, "long", at_s=100.0) for ticket in range(3)] == [2, 0, 0], "a turn, not the episode"
    assert [ask(pool, ticket, at_s=100.0) for ticket in range(3, 9)] == [0] * 6
    pool.on_event(VersionWanted(2))
    for engine in range(3):
        pool.on_event(Updated(engine, 2, 100.0))
    assert [ask(pool, ticket, at_s=100.0) for ticket in range(20, 26)] == [1, 0, 0, 0, 0, 0], "the others have some"


def test_an_engine_without_a_free_slot_is_asked_last_however_fast():
    pool = serving(1, 1)
    assert [ask(pool, ticket) for ticket in (100, 101)] == [0, 1]
    pool.on_event(Answered(100, num_tokens=900, at_s=1.0))
    pool.on_event(Answered(101, num_tokens=1, at_s=1.0))
    assert [ask(pool, ticket, at_s=1.0) for ticket in range(2)] == [0, 1]


def test_an_episode_stays_with_its_engine_however_busy_that_is():
    pool = serving(4, 4)
    home = ask(pool, 0, "long")
    pool.on_event(Answered(0, 5, 1.0))
    others = [ask(pool, ticket) for ticket in range(1, 4)]
    assert set(others) == {0, 1}
    assert [ask(pool, ticket, "long") for ticket in (10, 11, 12)] == [home] * 3


def test_a_request_whose_engine_broke_goes_to_another_one_and_its_episode_stays_there():
    pool = serving(4, 4)
    assert ask(pool, 0, "long") == 0
    assert pool.on_event(Broke(0, "lost", 1.0)) == [Send(0, 1)]
    pool.on_event(Answered(0, 5, 2.0))
    assert ask(pool, 1, "long") == 1


def test_a_request_that_broke_on_every_engine_is_refused_and_the_engines_go_on():
    pool = serving(4, 4)
    ask(pool, 0)
    pool.on_event(Broke(0, "poison", 1.0))
    assert pool.on_event(Broke(0, "poison", 1.0)) == [Refuse(0)]
    assert states(pool) == [MemberState.SERVING] * 2


def test_an_engine_that_keeps_breaking_gets_nothing_until_it_holds_a_version_again():
    pool = serving(64, 1)
    for ticket in range(MAX_FAILURES):
        assert ask(pool, ticket) == 0
        assert pool.on_event(Broke(ticket, "died", 0.0)) == [Send(ticket, 1)]
    assert states(pool) == [MemberState.FAILED, MemberState.SERVING]
    assert pool.members()[0].reason == "died"
    assert [ask(pool, ticket) for ticket in (10, 11)] == [1, 1]
    assert pool.on_event(VersionWanted(2)) == [Update(0, 2), Update(1, 2)]
    pool.on_event(Updated(0, 2, 5.0))
    assert states(pool) == [MemberState.SERVING] * 2 and ask(pool, 12) == 0


def lost(ticket):
    return Broke(ticket, "it hangs", 1.0, lost=True)


def test_an_engine_that_is_lost_is_brought_back_at_once_and_its_requests_go_elsewhere():
    pool = serving(4, 1)
    assert [ask(pool, ticket) for ticket in range(3)] == [0, 1, 0]
    assert pool.on_event(lost(0)) == [Update(0, 1), Send(0, 1)]
    assert pool.on_event(lost(2)) == [Send(2, 1)]
    assert states(pool) == [MemberState.LOST, MemberState.SERVING] and pool.members()[0].reason == "it hangs"
    assert ask(pool, 3) == 1
    assert pool.on_event(Updated(0, 1, 9.0)) == []
    assert states(pool) == [MemberState.SERVING] * 2 and ask(pool, 4) == 0


def test_where_every_engine_is_lost_requests_wait_for_the_first_that_is_back():
    pool = serving(4, 4)
    assert [ask(pool, ticket) for ticket in range(2)] == [0, 1]
    assert pool.on_event(lost(0)) == [Update(0, 1), Send(0, 1)]
    assert pool.on_event(lost(1)) == [Update(1, 1)]
    assert pool.on_event(lost(0)) == []
    assert pool.num_waiting == 2
    assert pool.on_event(Updated(1, 1, 9.0)) == [Send(0, 1), Send(1, 1)]


def test_a_request_with_which_an_engine_is_lost_twice_is_not_asked_there_again():
    pool = serving(4)
    ask(pool, 0)
    assert pool.on_event(lost(0)) == [Update(0, 1)]
    assert pool.on_event(Updated(0, 1, 9.0)) == [Send(0, 0)]
    assert pool.on_event(lost(0)) == [Update(0, 1), Refuse(0)]


def test_an_engine_that_cannot_be_brought_back_has_failed_and_what_waited_for_it_is_refused():
    pool = serving(4)
    ask(pool, 0)
    pool.on_event(lost(0))
    assert pool.on_event(UpdateFailed(0, "lost 4 times in a row", False, 9.0)) == [Refuse(0)]
    assert states(pool) == [MemberState.FAILED]


def test_an_engine_that_is_lost_in_an_update_is_updated_again():
    pool = serving(4, 4)
    pool.on_event(VersionWanted(2))
    assert pool.on_event(UpdateFailed(0, "it hangs", False, 2.0, lost=True)) == [Update(0, 2)]
    assert states(pool) == [MemberState.LOST, MemberState.SERVING]


def test_an_engine_that_is_lost_before_a_version_that_cannot_be_reached_comes_back_with_its_own():
    pool = serving(4, 4)
    pool.on_event(VersionWanted(9))
    ask(pool, 0)
    assert pool.on_event(lost(0)) == [Send(0, 1)]
    assert pool.on_event(UpdateFailed(0, "no such version", True, 2.0)) == [Update(0, 1)]
    pool.on_event(Updated(0, 1, 3.0))
    assert states(pool) == [MemberState.SERVING] * 2


def test_a_pool_with_an_engine_that_comes_back_goes_on_when_the_others_are_quarantined():
    pool = serving(4, 4)
    ask(pool, 0)
    pool.on_event(lost(0))
    pool.on_event(measured((1, 0, 100, 9.0)))
    assert states(pool) == [MemberState.LOST, MemberState.QUARANTINED]
    assert ask(pool, 1) is None
    assert pool.on_event(Updated(0, 1, 3.0)) == [Send(1, 0)]


def test_an_engine_that_lags_serves_those_who_take_its_version_and_is_sent_no_others():
    pool = serving(4, 4)
    pool.on_event(VersionWanted(2))
    pool.on_event(Updated(1, 2, 1.0))
    assert pool.policy_version == 2
    assert [ask(pool, ticket, min_policy_version=2) for ticket in range(5)] == [1] * 5
    assert ask(pool, 10, min_policy_version=1) == 0


def test_an_engine_that_lags_skips_the_versions_between():
    pool = serving(4)
    assert pool.on_event(VersionWanted(2)) == [Update(0, 2)]
    assert pool.on_event(VersionWanted(3)) == []
    assert pool.on_event(VersionWanted(4)) == []
    assert pool.on_event(Updated(0, 2, 1.0)) == [Update(0, 4)]
    assert pool.on_event(Updated(0, 4, 2.0)) == []


def test_a_request_waits_for_the_one_that_is_being_updated_and_for_nobody_else():
    pool = serving(4, 4)
    pool.on_event(VersionWanted(2))
    assert ask(pool, 0, min_policy_version=3) == "refused"
    assert ask(pool, 1, min_policy_version=2) is None
    assert pool.num_waiting == 1
    assert pool.on_event(UpdateFailed(0, "gone", False, 1.0)) == []
    assert pool.on_event(Updated(1, 2, 2.0)) == [Send(1, 1)]


def test_a_request_does_not_wait_for_an_engine_that_is_quarantined_while_it_is_updated():
    pool = serving(4, 4, 4)
    pool.on_event(VersionWanted(2))
    pool.on_event(Updated(0, 2, 1.0))
    assert pool.on_event(UpdateFailed(1, "gone", False, 1.0)) == []
    assert ask(pool, 0, min_policy_version=2) == 0
    assert pool.on_event(Broke(0, "lost", 1.0)) == [], "it waits for the third"
    assert pool.on_event(measured((2, 0, 100, 9.0))) == [Refuse(0)]


def test_a_version_that_nobody_can_reach_leaves_every_engine_as_it_was():
    pool = serving(4, 4)
    pool.on_event(VersionWanted(9))
    assert ask(pool, 0, min_policy_version=9) is None
    assert pool.on_event(UpdateFailed(0, "no such version", True, 1.0)) == []
    assert pool.on_event(UpdateFailed(1, "no such version", True, 1.0)) == [Refuse(0)]
    assert states(pool) == [MemberState.SERVING] * 2 and pool.policy_version == 1


def test_an_engine_beyond_the_bound_is_quarantined_and_no_other():
    pool = serving(4, 4, 4, bound=0.1, tokens=100)
    pool.on_event(measured((0, 0, 60, 0.02), (1, 0, 60, 0.5), (2, 0, 60, 0.1)))
    assert states(pool) == [MemberState.SERVING] * 3, "too few tokens to judge by"
    pool.on_event(measured((0, 0, 60, 0.02), (1, 0, 60, 0.4), (2, 0, 60, 0.1)))
    assert states(pool) == [MemberState.SERVING, MemberState.QUARANTINED, MemberState.SERVING]
    reason = pool.members()[1].reason
    assert "0.4500 nats per token" in reason and "last 120" in reason and "mismatch_bound is 0.1" in reason
    assert "everlong resume" in reason
    assert 1 not in [ask(pool, ticket) for ticket in range(12)]
    assert pool.on_event(VersionWanted(2)) == [Update(0, 2), Update(2, 2)]


def test_what_an_engine_did_long_ago_is_forgotten():
    pool = serving(4, bound=0.1, tokens=100)
    pool.on_event(measured((0, 0, 50, 0.9)))
    for _ in range(3):
        pool.on_event(measured((0, 0, 100, 0.01)))
    assert states(pool) == [MemberState.SERVING]
    assert pool.members()[0].mismatch == pytest.approx(0.01)


def test_the_age_of_a_version_is_held_against_nobody():
    """Two versions old, every engine is 0.4 nats away; only one is 0.3 further."""
    pool = serving(4, 4, 4, bound=0.1, tokens=100)
    pool.on_event(measured((0, 2, 100, 0.4), (1, 2, 100, 0.42), (2, 2, 100, 0.7)))
    assert states(pool) == [MemberState.SERVING, MemberState.SERVING, MemberState.QUARANTINED]
    assert [member.mismatch for member in pool.members()] == pytest.approx([0.0, 0.02, 0.3])


def test_one_that_lags_alone_is_not_judged_by_its_age():
    pool = serving(4, 4, bound=0.1, tokens=100)
    pool.on_event(measured((0, 0, 100, 0.0), (1, 3, 100, 0.9)))
    assert states(pool) == [MemberState.SERVING] * 2
    assert pool.members()[1].mismatch is None


def test_where_nobody_is_trusted_any_more_requests_wait_for_the_end_of_the_run():
    pool = serving(4, 4)
    assert ask(pool, 0) == 0
    pool.on_event(measured((0, 0, 100, 9.0), (1, 0, 100, 9.0)))
    assert states(pool) == [MemberState.QUARANTINED] * 2
    assert ask(pool, 1) is None
    assert pool.on_event(Broke(0, "lost", 1.0)) == []
    assert pool.num_waiting == 2


def test_before_the_first_version_nothing_is_taken():
    assert ask(dispatcher(4), 0) == "refused"


class FaultSchedules(RuleBasedStateMachine):
    """Engines join, lag, break, come back and are quarantined in any order; the model is a few dicts."""

    NUM = 3

    def __init__(self):
        super().__init__()
        self.pool = dispatcher(*(2,) * self.NUM, bound=0.1, tokens=10)
        self.now_s, self.num_asked = 0.0, 0
        self.running, self.waiting, self.broke_on, self.needs = {}, set(), {}, {}
        self.lost_on = {}
        self.updating, self.held, self.quarantined, self.newest = {}, {}, set(), 0

    def take(self, actions):
        for action in actions:
            match action:
                case Send(ticket, engine):
                    assert ticket in self.waiting and engine not in self.broke_on[ticket]
                    assert engine not in self.quarantined
                    assert self.pool.members()[engine].state is MemberState.SERVING
                    assert self.held[engine] >= self.needs[ticket]
                    self.waiting.remove(ticket)
                    self.running[ticket] = engine
                case Refuse(ticket):
                    assert ticket in self.waiting
                    assert not self.can_take(ticket) and not self.may_come(ticket)
                    self.waiting.remove(ticket)
                case Update(engine, version):
                    assert engine not in self.updating and engine not in self.quarantined
                    self.updating[engine] = version

    def can_take(self, ticket):
        """Engines that serve, with a version that is new enough."""
        serving = [e for e, member in enumerate(self.pool.members()) if member.state is MemberState.SERVING]
        return [e for e in serving if e not in self.broke_on[ticket] and self.held[e] >= self.needs[ticket]]

    def may_come(self, ticket):
        """Engines that load such a version."""
        coming = [e for e, version in self.updating.items() if version >= self.needs[ticket]]
        return [e for e in coming if e not in self.quarantined | self.broke_on[ticket]]

    @rule(episode=st.integers(0, 4), behind=st.integers(0, 2))
    def a_request_comes(self, episode, behind):
        ticket, self.num_asked = self.num_asked, self.num_asked + 1
        self.waiting.add(ticket)
        self.broke_on[ticket], self.needs[ticket] = set(), max(0, self.newest - behind)
        self.lost_on[ticket] = set()
        self.take(self.pool.on_event(Asked(ticket, f"e{episode}", self.needs[ticket], self.now_s)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(0, 50))
    def it_is_answered(self, data, num_tokens):
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        self.now_s += 1.0
        del self.running[ticket]
        self.take(self.pool.on_event(Answered(ticket, num_tokens, self.now_s)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def its_engine_breaks(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.running)))
        self.broke_on[ticket].add(self.running.pop(ticket))
        self.waiting.add(ticket)
        self.take(self.pool.on_event(Broke(ticket, "broke", self.now_s)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def its_engine_is_lost(self, data):
        """With all that it had; who had it says so one after the other. One that had failed waits for the next version."""
        lost = data.draw(st.sampled_from(sorted(set(self.running.values()))))
        had_failed = self.pool.members()[lost].state is MemberState.FAILED
        for ticket in [ticket for ticket, engine in self.running.items() if engine == lost]:
            del self.running[ticket]
            (self.broke_on if lost in self.lost_on[ticket] else self.lost_on)[ticket].add(lost)
            self.waiting.add(ticket)
            self.take(self.pool.on_event(Broke(ticket, "lost", self.now_s, lost=True)))
        assert lost in self.quarantined or lost in self.updating or had_failed

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def its_caller_goes_away(self, data):
        ticket = data.draw(st.sampled_from(sorted([*self.running, *self.waiting])))
        self.running.pop(ticket, None)
        self.waiting.discard(ticket)
        self.take(self.pool.on_event(Withdrawn(ticket)))

    @rule()
    def a_version_is_published(self):
        self.newest += 1
        self.take(self.pool.on_event(VersionWanted(self.newest)))

    @precondition(lambda self: self.updating)
    @rule(data=st.data(), end=st.sampled_from(["held", "unreachable", "broke", "lost"]))
    def an_update_ends(self, data, end):
        engine = data.draw(st.sampled_from(sorted(self.updating)))
        version = self.updating.pop(engine)
        if end == "held":
            self.held[engine] = version
            self.take(self.pool.on_event(Updated(engine, version, self.now_s)))
        else:
            failed = UpdateFailed(engine, end, end == "unreachable", self.now_s, lost=end == "lost")
            self.take(self.pool.on_event(failed))

    @precondition(lambda self: len(self.quarantined) < self.NUM - 1)
    @rule(engine=st.integers(0, NUM - 1), mean=st.sampled_from([0.0, 5.0]))
    def a_batch_is_trained(self, engine, mean):
        """Those that are left are good; one engine of the pool always stays."""
        actions = self.pool.on_event(measured((engine, 0, 10, mean)))
        if mean:
            self.quarantined.add(engine)
        self.take(actions)
        assert (self.pool.members()[engine].state is MemberState.QUARANTINED) == (engine in self.quarantined)

    @invariant()
    def nobody_waits_for_nobody(self):
        assert self.pool.num_waiting == len(self.waiting)
        out = {MemberState.FAILED, MemberState.QUARANTINED}
        if self.quarantined and all(member.state in out for member in self.pool.members()):
            return  # the run stops
        for ticket in self.waiting:
            assert self.may_come(ticket) and not self.can_take(ticket)

    @invariant()
    def what_it_says_of_itself_is_what_happened(self):
        for engine, member in enumerate(self.pool.members()):
            assert member.policy_version == self.held.get(engine, -1)
            assert (member.state is MemberState.QUARANTINED) == (engine in self.quarantined)


TestFaultSchedules = FaultSchedules.TestCase
TestFaultSchedules.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
