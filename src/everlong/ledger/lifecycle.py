"""The state machine behind the ledger. Pure: facts in, views out; a fact that contradicts what was said before is refused.

Views are frozen and replaced, so a refused fact leaves nothing behind, and facts handed over together are taken together.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Iterable, Mapping, MutableMapping
from functools import singledispatchmethod
from typing import TypeVar

import msgspec

from everlong.contracts.errors import LedgerError, Reason
from everlong.contracts.records import MemberState, Purpose, Record
from everlong.ledger.facts import (
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
    RunFinished,
    RunResumed,
    RunStarted,
    TokensDiscarded,
    TurnSampled,
    VersionPublished,
    WeightsAdopted,
)
from everlong.ledger.views import Balance, Decile, balance_of, deciles_of

INTERRUPTED = "interrupted"
"""The reason under which the tokens of a lost incarnation are discarded."""


class EpisodeView(Record, frozen=True, kw_only=True):
    """What the ledger knows of one episode."""

    episode: str
    purpose: Purpose
    group: int
    attempt: int
    task: str
    state: EpisodeState
    incarnation: int
    turns: frozenset[int] = frozenset()
    """Of this incarnation."""
    turn_tokens: int = 0
    """Sampled in turns of this incarnation."""
    stray_tokens: dict[str, int] = {}
    """Sampled by this incarnation and discarded before its end, by reason."""
    lost_tokens: dict[str, int] = {}
    """Of earlier incarnations, by reason; all discarded."""
    uncounted_calls: int = 0
    """Model calls, of all incarnations, of which nobody knows how many tokens they sampled."""
    flags: tuple[str, ...] = ()
    """Signs of cheating or tampering."""
    finish_reason: Reason | None = None
    """None until it finished."""
    reward: float | None = None
    payload_key: str = ""
    payload_hash: str = ""
    reason: str = ""
    """Why it ended; empty until then."""
    trained: int = 0
    discarded: dict[str, int] = {}
    """Of the last incarnation."""

    @property
    def num_sampled(self) -> int:
        """Tokens of this incarnation."""
        return self.turn_tokens + sum(self.stray_tokens.values())


class GroupView(Record, frozen=True, kw_only=True):
    purpose: Purpose
    group: int
    task: str
    content_hash: str
    episodes: tuple[str, ...] = ()
    """In the order of their first start."""
    engine_version: int = 0
    """What the engine held when it was opened: no member sampled a token with an older version."""
    batch: int | None = None
    """The batch that closed over it."""


class BatchView(Record, frozen=True, kw_only=True):
    batch: int
    groups: tuple[int, ...]
    policy_version: int | None = None
    """The version that training on it made; None until it is trained."""


class _Run(Record, frozen=True, kw_only=True):
    started: RunStarted | None = None
    finished: bool = False
    num_trained: int = 0
    """Batches that the trainer holds; falls back at a resume from an older checkpoint."""
    published_version: int | None = None
    engine_version: int | None = None
    quarantined: frozenset[str] = frozenset()
    """Engines of a pool that no longer sample, until the run is resumed."""


class Lifecycle:
    """Everything the facts so far amount to. `apply` raises LedgerError for a fact that cannot be true."""

    def __init__(self) -> None:
        self._run = _Run()
        self._episodes: MutableMapping[str, EpisodeView] = {}
        self._groups: MutableMapping[tuple[Purpose, int], GroupView] = {}
        self._batches: MutableMapping[int, BatchView] = {}
        self._evals: MutableMapping[int, EvalFinished] = {}

    # Views

    @property
    def episodes(self) -> Mapping[str, EpisodeView]:
        return self._episodes

    @property
    def groups(self) -> Mapping[tuple[Purpose, int], GroupView]:
        return self._groups

    @property
    def batches(self) -> Mapping[int, BatchView]:
        """By number, from 0 without a gap."""
        return self._batches

    @property
    def evals(self) -> Mapping[int, EvalFinished]:
        return self._evals

    @property
    def started(self) -> RunStarted | None:
        return self._run.started

    @property
    def finished(self) -> bool:
        return self._run.finished

    @property
    def num_trained(self) -> int:
        """Batches that the trainer holds: the next one to train is number `num_trained`."""
        return self._run.num_trained

    @property
    def policy_version(self) -> int:
        """Grows by one per trained batch, from 0."""
        trained = self._run.num_trained
        return 0 if trained == 0 else self._batches[trained - 1].policy_version or 0

    @property
    def published_version(self) -> int | None:
        return self._run.published_version

    @property
    def engine_version(self) -> int | None:
        return self._run.engine_version

    def open_episodes(self) -> list[EpisodeView]:
        """Those that have not reached an end."""
        return [view for view in self._episodes.values() if not view.state.terminal]

    def is_finished(self, purpose: Purpose, group: int) -> bool:
        """Whether every episode that the group started is finished or ended."""
        waiting = (EpisodeState.RUNNING, EpisodeState.INTERRUPTED)
        return all(self._episodes[name].state not in waiting for name in self._groups[purpose, group].episodes)

    def balance(self) -> Balance:
        return balance_of(self._episodes.values())

    def loss_by_length_decile(self) -> list[Decile]:
        """How many of the ended episodes were lost to failures, from the shortest tenth to the longest."""
        return deciles_of(self._episodes.values())

    # Facts

    def apply(self, *facts: Fact) -> None:
        """Take all of the facts, or none: raises LedgerError at the first that contradicts the ones before it."""
        draft = self._draft()
        for fact in facts:
            draft._check_run(fact)
            draft._apply(fact)
        self._adopt(draft)

    def _draft(self) -> Lifecycle:
        draft = Lifecycle()
        draft._run = self._run
        draft._episodes = ChainMap({}, self._episodes)
        draft._groups = ChainMap({}, self._groups)
        draft._batches = ChainMap({}, self._batches)
        draft._evals = ChainMap({}, self._evals)
        return draft

    def _adopt(self, draft: Lifecycle) -> None:
        self._run = draft._run
        self._episodes.update(_written(draft._episodes))
        self._groups.update(_written(draft._groups))
        self._batches.update(_written(draft._batches))
        self._evals.update(_written(draft._evals))

    def _check_run(self, fact: Fact) -> None:
        if isinstance(fact, RunStarted):
            _require(self._run.started is None, "the run started already: resume it, or use another folder")
        else:
            _require(self._run.started is not None, f"{_name(fact)} came before RunStarted")
        _require(
            not self._run.finished or isinstance(fact, RunResumed),
            f"{_name(fact)} came after RunFinished: resume the run first",
        )

    @singledispatchmethod
    def _apply(self, fact: Fact) -> None:
        raise TypeError(f"{fact!r} is not a fact")

    @_apply.register
    def _(self, fact: RunStarted) -> None:
        self._set_run(started=fact)

    @_apply.register
    def _(self, fact: RunResumed) -> None:
        num_batches = self.num_trained if fact.num_batches is None else fact.num_batches
        _require(
            0 <= num_batches <= self.num_trained,
            f"the run resumes with {fact.num_batches} trained batches, the ledger knows {self.num_trained}: "
            f"the checkpoint belongs to another run",
        )
        self._set_run(num_trained=num_batches, finished=False, quarantined=frozenset())

    @_apply.register
    def _(self, fact: GroupOpened) -> None:
        key = fact.purpose, fact.group
        _require(key not in self._groups, f"{fact.purpose} group {fact.group} was opened already")
        self._groups[key] = GroupView(
            purpose=fact.purpose,
            group=fact.group,
            task=fact.task,
            content_hash=fact.content_hash,
            engine_version=self.engine_version or 0,
        )

    @_apply.register
    def _(self, fact: EpisodeStarted) -> None:
        group = self._groups.get((fact.purpose, fact.group))
        if group is None:
            raise LedgerError(f"{fact.episode} started before its {fact.purpose} group {fact.group} was opened")
        _require(group.task == fact.task, f"{fact.episode} has task {fact.task}, its group has {group.task}")
        _require(group.batch is None, f"{fact.episode} started after batch {group.batch} closed over its group")
        known = self._episodes.get(fact.episode)
        if known is None:
            self._first_start(fact, group)
        else:
            self._restart(fact, known)

    def _first_start(self, fact: EpisodeStarted, group: GroupView) -> None:
        _require(fact.incarnation == 0, f"{fact.episode} starts with incarnation {fact.incarnation}, expected 0")
        taken = {self._episodes[name].attempt: name for name in group.episodes}
        _require(
            fact.attempt not in taken,
            f"{fact.episode} claims attempt {fact.attempt} of its group, which is {taken.get(fact.attempt)}",
        )
        self._episodes[fact.episode] = EpisodeView(
            episode=fact.episode,
            purpose=fact.purpose,
            group=fact.group,
            attempt=fact.attempt,
            task=fact.task,
            state=EpisodeState.RUNNING,
            incarnation=0,
        )
        key = fact.purpose, fact.group
        self._groups[key] = msgspec.structs.replace(group, episodes=(*group.episodes, fact.episode))

    def _restart(self, fact: EpisodeStarted, known: EpisodeView) -> None:
        _require(
            known.state is EpisodeState.INTERRUPTED,
            f"{fact.episode} started again while it is {known.state}: only an interrupted one may",
        )
        same = (known.purpose, known.group, known.attempt) == (fact.purpose, fact.group, fact.attempt)
        _require(same, f"{fact.episode} started again as another attempt than before")
        expected = known.incarnation + 1
        _require(
            fact.incarnation == expected,
            f"{fact.episode} started again as incarnation {fact.incarnation}, expected {expected}",
        )
        self._set_episode(
            known,
            state=EpisodeState.RUNNING,
            incarnation=expected,
            turns=frozenset(),
            turn_tokens=0,
            stray_tokens={},
        )

    @_apply.register
    def _(self, fact: TurnSampled) -> None:
        view = self._running(fact)
        _require(fact.turn >= 0 and fact.num_tokens >= 0, f"{fact.episode}: negative count in {fact}")
        _require(fact.turn not in view.turns, f"turn {fact.turn} of {fact.episode} was sampled already")
        self._set_episode(view, turns=view.turns | {fact.turn}, turn_tokens=view.turn_tokens + fact.num_tokens)

    @_apply.register
    def _(self, fact: TokensDiscarded) -> None:
        view = self._running(fact)
        _require(fact.num_tokens >= 0, f"{fact.episode}: negative count in {fact}")
        _require(bool(fact.reason), f"{fact.episode} discards {fact.num_tokens} tokens without a reason")
        self._set_episode(view, stray_tokens=_add(view.stray_tokens, {fact.reason: fact.num_tokens}))

    @_apply.register
    def _(self, fact: CallUncounted) -> None:
        view = self._running(fact)
        _require(fact.max_tokens > 0, f"{fact.episode}: a call that may sample nothing has nothing to count in {fact}")
        _require(bool(fact.reason), f"{fact.episode} has an uncounted call without a reason")
        self._set_episode(view, uncounted_calls=view.uncounted_calls + 1)

    @_apply.register
    def _(self, fact: EpisodeInterrupted) -> None:
        view = self._running(fact)
        lost = _add(_add(view.lost_tokens, view.stray_tokens), {INTERRUPTED: view.turn_tokens})
        self._set_episode(
            view, state=EpisodeState.INTERRUPTED, lost_tokens=lost, turns=frozenset(), turn_tokens=0, stray_tokens={}
        )

    @_apply.register
    def _(self, fact: EpisodeFinished) -> None:
        view = self._running(fact)
        _require(
            fact.num_sampled == view.num_sampled,
            f"{fact.episode} finished with {fact.num_sampled} sampled tokens, its turns and discards sum to "
            f"{view.num_sampled}: a turn was not recorded or recorded twice",
        )
        if fact.reward is not None:
            _require(fact.reason.trustworthy, f"{fact.episode} ended with {fact.reason}, which can have no reward")
            _require(math.isfinite(fact.reward), f"{fact.episode} has reward {fact.reward}, which is not finite")
        self._set_episode(
            view,
            state=EpisodeState.FINISHED,
            finish_reason=fact.reason,
            reward=fact.reward,
            flags=fact.flags,
            payload_key=fact.payload_key,
            payload_hash=fact.payload_hash,
        )

    @_apply.register
    def _(self, fact: BatchClosed) -> None:
        expected = len(self._batches)
        _require(fact.batch == expected, f"batch {fact.batch} closed out of order, expected batch {expected}")
        _require(len(set(fact.groups)) == len(fact.groups), f"batch {fact.batch} names a group twice: {fact.groups}")
        for number in fact.groups:
            group = self._groups.get((Purpose.TRAIN, number))
            if group is None:
                raise LedgerError(f"batch {fact.batch} names group {number}, which was never opened")
            _require(group.batch is None, f"batch {fact.batch} names group {number}, which batch {group.batch} holds")
            _require(
                self.is_finished(Purpose.TRAIN, number),
                f"batch {fact.batch} names group {number}, which has episodes that are not finished",
            )
            self._groups[Purpose.TRAIN, number] = msgspec.structs.replace(group, batch=fact.batch)
        self._batches[fact.batch] = BatchView(batch=fact.batch, groups=fact.groups)

    @_apply.register
    def _(self, fact: BatchTrained) -> None:
        _require(
            fact.batch == self.num_trained,
            f"batch {fact.batch} trained out of order, expected batch {self.num_trained}",
        )
        batch = self._batches.get(fact.batch)
        if batch is None:
            raise LedgerError(f"batch {fact.batch} was trained before it closed")
        expected = self.policy_version + 1
        _require(
            fact.policy_version == expected,
            f"batch {fact.batch} made policy version {fact.policy_version}, expected {expected}",
        )
        self._batches[fact.batch] = msgspec.structs.replace(batch, policy_version=fact.policy_version)
        self._set_run(num_trained=fact.batch + 1)

    @_apply.register
    def _(self, fact: EpisodeEnded) -> None:
        view = self._open(fact.episode, "ended")
        _require(fact.state.terminal, f"{fact.episode} cannot end as {fact.state}")
        _require(bool(fact.reason), f"{fact.episode} ended as {fact.state} without a reason")
        _check_tokens(fact, view)
        self._check_end(fact, view)
        self._set_episode(
            view,
            state=fact.state,
            reason=fact.reason,
            trained=fact.trained,
            discarded=dict(fact.discarded),
            turns=frozenset(),
        )

    def _check_end(self, fact: EpisodeEnded, view: EpisodeView) -> None:
        """Whether what led here allows this end."""
        needs_finish = fact.state in (EpisodeState.TRAINED, EpisodeState.EVALUATED, EpisodeState.DISCARDED)
        _require(
            not needs_finish or view.state is EpisodeState.FINISHED,
            f"{fact.episode} is {view.state} and cannot end as {fact.state}: it has not finished",
        )
        if fact.state is EpisodeState.EVALUATED:
            _require(view.purpose is Purpose.EVAL, f"{fact.episode} is for training and cannot end as evaluated")
            _require(view.reward is not None, f"{fact.episode} has no verdict and cannot end as evaluated: it failed")
        if fact.state is EpisodeState.TRAINED:
            _require(view.purpose is Purpose.TRAIN, f"{fact.episode} is for evaluation and cannot end as trained")
            batch = self._groups[view.purpose, view.group].batch
            _require(
                batch is not None and batch < self.num_trained,
                f"{fact.episode} cannot end as trained: its group is in no batch that was trained",
            )
            _require(fact.trained > 0, f"{fact.episode} ended as trained without a trained token: discard it")

    @_apply.register
    def _(self, fact: WeightsAdopted) -> None:
        _require(
            fact.version == self.policy_version,
            f"the weights of version {fact.version} were adopted, the policy is at {self.policy_version}",
        )
        _require(
            fact.trained != fact.published, f"version {fact.version} came out as it was published: nothing to adopt"
        )

    @_apply.register
    def _(self, fact: VersionPublished) -> None:
        _require(
            0 <= fact.version <= self.policy_version,
            f"version {fact.version} was published, the policy is at {self.policy_version}",
        )
        _require(
            fact.base_version is None or fact.base_version < fact.version,
            f"version {fact.version} was published on base {fact.base_version}, which is not older",
        )
        self._set_run(published_version=fact.version)

    @_apply.register
    def _(self, fact: EngineUpdated) -> None:
        published = self.published_version
        _require(
            published is not None and fact.version <= published,
            f"the engine was updated to version {fact.version}, the newest published one is {published}",
        )
        self._set_run(engine_version=fact.version)

    @_apply.register
    def _(self, fact: EngineChanged) -> None:
        quarantined = self._run.quarantined
        _require(
            fact.engine not in quarantined,
            f"engine {fact.engine} is {fact.state} after it was quarantined, which ends with a resume only",
        )
        if fact.state is MemberState.QUARANTINED:
            self._set_run(quarantined=quarantined | {fact.engine})

    @_apply.register
    def _(self, fact: EvalFinished) -> None:
        _require(fact.index not in self._evals, f"evaluation {fact.index} was recorded already")
        _require(
            0 <= fact.successes <= fact.episodes,
            f"evaluation {fact.index} has {fact.successes} successes in {fact.episodes} episodes",
        )
        self._evals[fact.index] = fact

    @_apply.register
    def _(self, fact: RunFinished) -> None:
        names = [view.episode for view in self.open_episodes()]
        _require(not names, f"the run cannot finish: {len(names)} episodes have no end, the first is {names[:1]}")
        self._set_run(finished=True)

    # Helpers of the facts

    def _open(self, episode: str, event: str) -> EpisodeView:
        view = self._episodes.get(episode)
        if view is None:
            raise LedgerError(f"{episode} {event} without a start")
        _require(not view.state.terminal, f"{episode} {event} after its end as {view.state} ({view.reason})")
        return view

    def _running(
        self, fact: TurnSampled | TokensDiscarded | CallUncounted | EpisodeInterrupted | EpisodeFinished
    ) -> EpisodeView:
        view = self._open(fact.episode, f"got a {_name(fact)}")
        _require(view.state is EpisodeState.RUNNING, f"{fact.episode} got a {_name(fact)} while it is {view.state}")
        _require(
            fact.incarnation == view.incarnation,
            f"{fact.episode} got a {_name(fact)} of incarnation {fact.incarnation}, running is {view.incarnation}: "
            f"a process that should be dead is still writing",
        )
        return view

    def _set_episode(self, view: EpisodeView, **changes: object) -> None:
        self._episodes[view.episode] = msgspec.structs.replace(view, **changes)

    def _set_run(self, **changes: object) -> None:
        self._run = msgspec.structs.replace(self._run, **changes)


def replay(facts: Iterable[Fact]) -> Lifecycle:
    """What the facts amount to. Raises LedgerError at the first that contradicts the ones before it."""
    lifecycle = Lifecycle()
    for fact in facts:
        lifecycle.apply(fact)
    return lifecycle


K = TypeVar("K")
V = TypeVar("V")


def _written(draft: MutableMapping[K, V]) -> MutableMapping[K, V]:
    """What was written to a draft's mapping, without what shines through from below."""
    assert isinstance(draft, ChainMap)
    return draft.maps[0]


def _check_tokens(fact: EpisodeEnded, view: EpisodeView) -> None:
    """Every token that the last incarnation sampled is trained or discarded, once."""
    _require(
        fact.trained >= 0 and all(count >= 0 for count in fact.discarded.values()),
        f"{fact.episode} ended with a negative token count: trained {fact.trained}, discarded {fact.discarded}",
    )
    total = fact.trained + sum(fact.discarded.values())
    _require(
        total == view.num_sampled,
        f"{fact.episode} ended with {fact.trained} tokens trained and {fact.discarded} discarded, {total} in all, "
        f"but sampled {view.num_sampled}",
    )
    _require(
        fact.state is EpisodeState.TRAINED or fact.trained == 0,
        f"{fact.episode} ended as {fact.state} with {fact.trained} tokens trained, expected 0",
    )
    short = {why: count for why, count in view.stray_tokens.items() if fact.discarded.get(why, 0) < count}
    _require(
        not short,
        f"{fact.episode} ended with discards {fact.discarded}, which leave out earlier ones: {short}",
    )


def _add(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    total = dict(counts)
    for reason, count in more.items():
        if count:
            total[reason] = total.get(reason, 0) + count
    return total


def _name(fact: Fact) -> str:
    return type(fact).__name__


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise LedgerError(message)
