"""Which engine of a pool takes a request, and which is trusted: a state machine without clock and without engines.

Invariants: a request is with one engine, or waits, or has ended; it goes to no engine that is quarantined, that failed, whose
version is too old for it, or on which it broke before; it waits only while somebody may yet take it. An engine that is lost is
updated at once, which brings it back; its requests go to others, or wait for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from everlong.contracts.records import EngineMismatch, MemberState, MemberStatus
from everlong.contracts.tokens import NO_VERSION
from everlong.engines.pool.events import (
    Action,
    Answered,
    Asked,
    Broke,
    Event,
    Measured,
    Refuse,
    Send,
    Update,
    Updated,
    UpdateFailed,
    VersionWanted,
    Withdrawn,
)
from everlong.engines.pool.measures import MismatchWindow, Speed, excess

MAX_FAILURES = 3
"""Failures in a row, without an answer between, after which an engine gets no more requests: one may be the request's doing."""
MAX_EPISODES = 16_384
"""Whose engine is remembered; nobody says when an episode ends. One that was forgotten has its prompt computed once more."""


@dataclass(slots=True)
class _Member:
    """One engine as the dispatcher sees it."""

    name: str
    slots: int
    """Requests that it runs together."""
    window: MismatchWindow
    state: MemberState = MemberState.JOINING
    version: int = NO_VERSION
    updating: int | None = None
    """The version that it is loading."""
    wanted: int = NO_VERSION
    asked: bool = False
    """Whether a request was sent to it since it holds this version."""
    failures: int = 0
    """In a row."""
    reason: str = ""
    tickets: set[int] = field(default_factory=set)
    speed: Speed = field(default_factory=Speed)

    @property
    def serves(self) -> bool:
        return self.state is MemberState.SERVING

    @property
    def trusted(self) -> bool:
        return self.state is not MemberState.QUARANTINED

    @property
    def unheard(self) -> bool:
        """Whether it has nothing to do and has had nothing since its last update."""
        return not self.asked and not self.tickets

    def may_hold(self, policy_version: int) -> bool:
        """Whether the update under way, if it succeeds, brings a version that is new enough."""
        return self.trusted and self.updating is not None and self.updating >= policy_version


@dataclass(slots=True)
class _Request:
    ticket: int
    episode: str
    min_policy_version: int
    member: int | None = None
    broke_on: set[int] = field(default_factory=set)
    lost_on: set[int] = field(default_factory=set)
    """Engines that were lost while they had it; one that is lost so twice broke on it."""


class Dispatcher:
    def __init__(
        self, names: Sequence[str], slots: Sequence[int], *, mismatch_bound: float, mismatch_tokens: int
    ) -> None:
        """One name and one number of slots for each engine."""
        self._bound = mismatch_bound
        self._members = [
            _Member(name, size, MismatchWindow(mismatch_tokens)) for name, size in zip(names, slots, strict=True)
        ]
        self._requests: dict[int, _Request] = {}
        self._homes: OrderedDict[str, int] = OrderedDict()
        """Engine by episode, which has the episode's prompt in its prefix cache; the one last asked comes last."""
        self._halted = False
        """Nobody is trusted any more: the run is about to be stopped, and no request shall fail for it."""

    def on_event(self, event: Event) -> list[Action]:
        match event:
            case Asked():
                self._requests[event.ticket] = _Request(event.ticket, event.episode, event.min_policy_version)
                return self._place([event.ticket], event.at_s)
            case Answered():
                member = self._release(event.ticket)
                member.failures = 0
                member.speed.count(event.num_tokens, event.at_s)
                del self._requests[event.ticket]
                return []
            case Broke():
                return self._broke(event)
            case Withdrawn():
                self._withdraw(event.ticket)
                return []
            case VersionWanted():
                return self._want(event.policy_version)
            case Updated():
                return self._updated(event)
            case UpdateFailed():
                return self._update_failed(event)
            case Measured():
                self._judge(event.mismatch)
                return self._place_waiting(event.at_s)

    # What is known ---------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The newest that an engine which serves holds."""
        return max((member.version for member in self._members if member.serves), default=NO_VERSION)

    @property
    def num_waiting(self) -> int:
        return sum(request.member is None for request in self._requests.values())

    @property
    def speeds(self) -> dict[str, float]:
        """Tokens per second by engine, of those that have answered."""
        speeds = {member.name: member.speed.tokens_per_s for member in self._members}
        return {name: speed for name, speed in speeds.items() if speed is not None}

    def holds(self, policy_version: int) -> bool:
        """Whether an engine that serves has this version."""
        return any(member.serves and member.version == policy_version for member in self._members)

    def members(self) -> tuple[MemberStatus, ...]:
        return tuple(
            MemberStatus(
                engine=member.name,
                state=member.state,
                policy_version=member.version,
                mismatch=member.window.mean,
                num_measured=member.window.num_tokens,
                reason=member.reason,
            )
            for member in self._members
        )

    # Requests --------------------------------------------------------------------------------------------------------

    def _place(self, tickets: Iterable[int], at_s: float) -> list[Action]:
        """Send each of these to an engine, let it wait, or refuse it."""
        actions: list[Action] = []
        for ticket in tickets:
            request = self._requests[ticket]
            fit = [i for i, member in enumerate(self._members) if self._can_take(request, i) and member.serves]
            if fit and not self._halted:
                actions.append(self._send(request, fit, at_s))
            elif not self._halted and not self._may_yet_be_taken(request):
                del self._requests[ticket]
                actions.append(Refuse(ticket))
        return actions

    def _can_take(self, request: _Request, index: int) -> bool:
        return self._members[index].version >= request.min_policy_version and index not in request.broke_on

    def _may_yet_be_taken(self, request: _Request) -> bool:
        return any(
            member.may_hold(request.min_policy_version) and index not in request.broke_on
            for index, member in enumerate(self._members)
        )

    def _send(self, request: _Request, fit: Sequence[int], at_s: float) -> Send:
        """To the episode's engine, else to the one that is through soonest. But one that is unheard gets this turn, and not
        the episode, so that an engine which was slow once, or has few slots, is measured, and measured again."""
        home = index = self._homes.pop(request.episode, -1)
        if home not in fit:
            home = min(fit, key=self._load)
            index = next((other for other in fit if self._members[other].unheard), home)
        self._homes[request.episode] = home
        if len(self._homes) > MAX_EPISODES:
            self._homes.popitem(last=False)
        member = self._members[index]
        member.asked = True
        if not member.tickets:
            member.speed.begin(at_s)
        member.tickets.add(request.ticket)
        request.member = index
        return Send(request.ticket, index)

    def _load(self, index: int) -> tuple[bool, float, int]:
        """Those with a free slot first, then by the time in which an engine gets through what it has."""
        member = self._members[index]
        return len(member.tickets) >= member.slots, (len(member.tickets) + 1) / self._speed(member), index

    def _speed(self, member: _Member) -> float:
        """Measured, or what its slots would give at the others' speed per slot."""
        if (own := member.speed.tokens_per_s) is not None:
            return own
        known = [(other.speed.tokens_per_s, other.slots) for other in self._members]
        per_slot = [speed / slots for speed, slots in known if speed is not None]
        return member.slots * (sum(per_slot) / len(per_slot) if per_slot else 1.0)

    def _release(self, ticket: int) -> _Member:
        """Take the request from the engine that has it."""
        request = self._requests[ticket]
        assert request.member is not None
        member = self._members[request.member]
        member.tickets.remove(ticket)
        request.member = None
        return member

    def _broke(self, event: Broke) -> list[Action]:
        request = self._requests[event.ticket]
        assert request.member is not None
        index = request.member
        member = self._release(event.ticket)
        if event.lost:
            (request.broke_on if index in request.lost_on else request.lost_on).add(index)
            return [*self._lost(index, event.reason), *self._place([event.ticket], event.at_s)]
        request.broke_on.add(index)
        member.failures += 1
        if member.failures >= MAX_FAILURES and member.serves:
            member.state, member.reason = MemberState.FAILED, event.reason
        return self._place([event.ticket], event.at_s)

    def _lost(self, index: int, reason: str) -> list[Action]:
        """Bring it back, unless it is being updated: then that ends with the loss too."""
        member = self._members[index]
        if member.serves:
            member.state, member.reason = MemberState.LOST, reason
        lost = member.state is MemberState.LOST and member.updating is None
        return [self._update(index)] if lost else []

    def _withdraw(self, ticket: int) -> None:
        if ticket not in self._requests:
            return  # refused
        if self._requests[ticket].member is not None:
            self._release(ticket)
        del self._requests[ticket]

    def _place_waiting(self, at_s: float) -> list[Action]:
        return self._place([ticket for ticket, request in self._requests.items() if request.member is None], at_s)

    # Weights ---------------------------------------------------------------------------------------------------------

    def _want(self, policy_version: int) -> list[Action]:
        actions: list[Action] = []
        for index, member in enumerate(self._members):
            if member.trusted:
                member.wanted = policy_version
                if member.updating is None:
                    actions.append(self._update(index))
        return actions

    def _update(self, index: int) -> Update:
        member = self._members[index]
        member.updating = member.wanted
        return Update(index, member.wanted)

    def _updated(self, event: Updated) -> list[Action]:
        member = self._members[event.engine]
        member.updating, member.version, member.asked = None, event.policy_version, False
        if member.trusted and not member.serves:
            member.state, member.reason, member.failures = MemberState.SERVING, "", 0
            self._halted = False
        return [*self._next_update(event.engine, event.policy_version), *self._place_waiting(event.at_s)]

    def _update_failed(self, event: UpdateFailed) -> list[Action]:
        member = self._members[event.engine]
        tried, member.updating = member.updating, None
        if event.lost and member.state in (MemberState.SERVING, MemberState.LOST):
            return [*self._lost(event.engine, event.reason), *self._place_waiting(event.at_s)]
        if member.state is MemberState.LOST and event.unreachable and tried != member.version:
            member.wanted = member.version  # it is to come back at all
        if not event.unreachable and member.trusted:
            member.state, member.reason = MemberState.FAILED, event.reason
        return [*self._next_update(event.engine, tried), *self._place_waiting(event.at_s)]

    def _next_update(self, index: int, tried: int | None) -> list[Action]:
        """Another version may have been asked for meanwhile; what lies between is skipped."""
        member = self._members[index]
        return [self._update(index)] if member.trusted and member.wanted != tried else []

    # Trust -----------------------------------------------------------------------------------------------------------

    def _judge(self, mismatch: Sequence[EngineMismatch]) -> None:
        for index, member in enumerate(self._members):
            counted = [(part.num_tokens, excess(part, mismatch)) for part in mismatch if part.engine == index]
            known = [(num_tokens, total) for num_tokens, total in counted if total is not None]
            if known:
                member.window.add(sum(n for n, _ in known), sum(total for _, total in known))
            mean = member.window.mean
            if member.trusted and mean is not None and member.window.full and mean > self._bound:
                member.state = MemberState.QUARANTINED
                member.reason = (
                    f"its logprobs are {mean:.4f} nats per token from the trainer's, over its last {member.window.num_tokens} "
                    f"measured tokens, and engine.mismatch_bound is {self._bound:g}: compare its weights, dtype and kernels with "
                    "the others', or raise the bound in the run's config.toml; the next `everlong resume` takes it in again"
                )
        if not any(member.state.hopeful for member in self._members):
            self._halted |= any(not member.trusted for member in self._members)
