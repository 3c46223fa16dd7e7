"""A run in simulated time: a scheduler, episodes that last what they are told to, and a trainer that takes its time.

It keeps the versions of every token that would be sampled, one token per second of an episode's life, so that what a
schedule promises about staleness is seen and not believed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from everlong.contracts.errors import Reason
from everlong.contracts.records import EpisodeOrder, Purpose
from everlong.orchestrator.config import WarmupConfig
from everlong.orchestrator.events import (
    BatchDone,
    CancelEpisode,
    DropGroup,
    EngineUpdated,
    EpisodeEnded,
    EvalRecorded,
    PauseSampling,
    Publish,
    Published,
    RecordEval,
    ResumeSampling,
    RunEpisode,
    Started,
    Tick,
    TrainGroups,
    UpdateEngine,
    WarmUp,
)
from everlong.orchestrator.progress import Progress
from everlong.orchestrator.schedules import make_scheduler


class Broken(Exception):
    """The simulation stands still before its end."""


@dataclass
class Alive:
    """An episode under way."""

    order: EpisodeOrder
    left_s: float
    since_s: float | None
    """Since when it moves; None while sampling is paused."""
    ticket: int = 0
    """Of the end that is planned: a pause makes another one."""
    versions: set[int] = field(default_factory=set)
    """Of the tokens that it sampled."""
    began_s: float = 0.0


@dataclass(frozen=True)
class Trained:
    batch: int
    groups: tuple[int, ...]
    at_s: float
    """When it was closed."""
    num_episodes: int
    oldest: int
    """Version of its oldest token."""
    deadlines: int


class Simulation:
    """`duration_s` says how long an episode samples; `train_s`, `publish_s` and `update_s` how long the others take."""

    def __init__(
        self,
        schedule,
        duration_s: Callable[[EpisodeOrder], float],
        *,
        train_s: float = 0.0,
        publish_s: float = 0.0,
        update_s: float = 0.0,
        num_tasks: int = 12,
        num_evals: int = 0,
        warmup: int = 0,
        progress: Progress | None = None,
        versions: dict[str, set[int]] | None = None,
    ) -> None:
        self.duration_s, self.train_s, self.publish_s, self.update_s = duration_s, train_s, publish_s, update_s
        self.schedule = schedule
        self.scheduler = make_scheduler(
            schedule,
            WarmupConfig(num_batches=warmup),
            train_tasks=[f"t{number}" for number in range(num_tasks)],
            eval_tasks=[f"e{number}" for number in range(num_evals)],
            seed=0,
            progress=progress,
        )
        self.now_s, self.version, self.held = 0.0, (progress or Progress()).num_batches, -1
        self.paused, self.alive = False, {}
        self.versions = versions if versions is not None else {}
        """Of the tokens of every episode that ended, by episode."""
        self.started: list[EpisodeOrder] = []
        self.trained: list[Trained] = []
        self.evals: list[tuple[int, set[int]]] = []
        self.opened: dict[int, int] = dict((progress or Progress()).open_groups)
        """The engine's version when a training group was first seen."""
        self.log: list[object] = []
        self._cancelled: dict[str, Reason] = {}
        self.ends: dict[str, Reason] = {}
        """Of every episode that ended in this simulation."""
        self.cancelled_at_once: set[str] = set()
        """Episodes that were cancelled in the moment in which they began."""
        self._agenda: list[tuple[float, int, object]] = []
        self._numbers = itertools.count()
        self._feed(Started(0.0))

    def run(self, until: Callable[[], bool] = lambda: False, max_events: int = 1_000_000) -> Simulation:
        for _ in range(max_events):
            if self.scheduler.finished or until() or not self.step():
                return self
        raise Broken("it never ends")

    def step(self) -> bool:
        """One event. False where nothing is planned and the scheduler is finished."""
        wake_s = self.scheduler.wake_at_s
        if self._agenda and (wake_s is None or self._agenda[0][0] <= wake_s):
            self.now_s, _, event = heapq.heappop(self._agenda)
            self._happen(event)
        elif wake_s is not None:
            self.now_s = max(self.now_s, wake_s)
            self._feed(Tick(self.now_s))
        elif self.scheduler.finished:
            return False
        else:
            raise Broken(f"nothing will happen after {self.now_s} s: {len(self.trained)} batches trained")
        return True

    def progress(self) -> Progress:
        """What the ledger would say after a kill at this moment."""
        done = [batch for batch in self.trained if batch.batch < self.version]
        closed = next((batch.groups for batch in self.trained if batch.batch >= self.version), None)
        consumed = {group for batch in done for group in batch.groups} | self.consumed_before
        held = consumed | set(closed or ())
        return Progress(
            num_batches=self.version,
            consumed=frozenset(consumed),
            closed_groups=closed,
            open_groups={group: version for group, version in self.opened.items() if group not in held},
            ended=frozenset(self.versions),
            incarnations={name: one.order.incarnation + 1 for name, one in self.alive.items()},
            evals=frozenset(index for index, _ in self.evals) | self.evals_before,
        )

    consumed_before: frozenset[int] = frozenset()
    evals_before: frozenset[int] = frozenset()

    # What happens

    def _plan(self, after_s: float, event: object) -> None:
        heapq.heappush(self._agenda, (self.now_s + after_s, next(self._numbers), event))

    def _happen(self, event: object) -> None:
        match event:
            case ("end", name, ticket):
                if name in self.alive and self.alive[name].ticket == ticket:
                    self._end(name, self._cancelled.get(name, Reason.DONE))
                return
            case BatchDone():
                self.version = event.batch + 1
            case EngineUpdated():
                for one in self.alive.values():
                    self._move(one)  # what it sampled until now has the old version
                self.held = event.policy_version
                for one in self.alive.values():
                    self._sample(one)
            case EvalRecorded():
                names = [name for name in self.versions if name.startswith("eval")]
                seen = set().union(*(self.versions[name] for name in names if self._eval_of(name) == event.index))
                self.evals.append((event.index, seen))
        self._feed(event)

    def _eval_of(self, name: str) -> int:
        return int(name.split("-")[1]) // max(1, self.num_evals)

    num_evals = 1

    def _feed(self, event) -> None:
        event = type(event)(*[self.now_s, *[getattr(event, f) for f in event.__slots__ if f != "now_s"]])
        for action in self.scheduler.on_event(event):
            self.log.append(action)
            self._carry_out(action)

    def _carry_out(self, action) -> None:
        match action:
            case RunEpisode():
                self._begin(action.order)
            case CancelEpisode():
                self._cancelled[action.episode] = action.reason
                if self.alive[action.episode].began_s == self.now_s:
                    self.cancelled_at_once.add(action.episode)
                self.alive[action.episode].ticket += 1
                self._plan(0.0, ("end", action.episode, self.alive[action.episode].ticket))
            case DropGroup():
                pass
            case PauseSampling():
                for one in self.alive.values():
                    self._move(one)
                    one.since_s = None
                    one.ticket += 1
                self.paused = True
            case ResumeSampling():
                self.paused = False
                for one in self.alive.values():
                    if one.since_s is None:
                        self._go(one)
            case WarmUp():
                self._plan(0.0, BatchDone(0.0, action.batch, action.batch + 1))
            case TrainGroups():
                self.trained.append(self._trained(action))
                self._plan(self.train_s, BatchDone(0.0, action.batch, action.batch + 1))
            case Publish():
                self._plan(self.publish_s, Published(0.0, self.version))
            case UpdateEngine():
                self._plan(self.update_s, EngineUpdated(0.0, action.policy_version))
            case RecordEval():
                self._plan(0.0, EvalRecorded(0.0, action.index))

    def _trained(self, action: TrainGroups) -> Trained:
        names = [
            name for name in self.versions if name.startswith("train") and int(name.split("-")[1]) in action.groups
        ]
        assert not [
            one
            for one in self.alive.values()
            if one.order.purpose is Purpose.TRAIN and one.order.group in action.groups
        ]
        oldest = min((min(self.versions[name], default=action.batch) for name in names), default=action.batch)
        return Trained(action.batch, action.groups, self.now_s, len(names), oldest, action.deadlines)

    # Episodes

    def _begin(self, order: EpisodeOrder) -> None:
        assert order.episode not in self.alive and order.episode not in self.versions, "sampled twice"
        assert order.min_policy_version <= self.held, "the engine would refuse it"
        self.started.append(order)
        if order.purpose is Purpose.TRAIN:
            self.opened.setdefault(order.group, self.held)
        one = self.alive[order.episode] = Alive(order, self.duration_s(order), None, began_s=self.now_s)
        if not self.paused:
            self._go(one)

    def _go(self, one: Alive) -> None:
        one.since_s = self.now_s
        self._sample(one)
        one.ticket += 1
        self._plan(one.left_s, ("end", one.order.episode, one.ticket))

    def _sample(self, one: Alive) -> None:
        if one.since_s is not None:
            one.versions.add(self.held)

    def _move(self, one: Alive) -> None:
        if one.since_s is not None:
            one.left_s -= self.now_s - one.since_s
            one.since_s = self.now_s

    def _end(self, name: str, reason: Reason) -> None:
        one = self.alive.pop(name)
        self.versions[name], self.ends[name] = one.versions, reason
        self._feed(EpisodeEnded(self.now_s, one.order, reason, 1.0 if reason is Reason.DONE else None))
