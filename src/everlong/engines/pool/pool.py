"""The engine port in front of several engines: carries out what the dispatcher decides and tells it what came of it.

A request whose engine failed is asked again of another one: nobody has seen an answer, so nothing is lost and no turn is
of two engines. Every token says which engine sampled it, so that the trainer can say how far each is from it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from everlong.contracts.errors import EngineError, EngineLost, StaleWeights
from everlong.contracts.ports import Engine
from everlong.contracts.records import (
    EngineMismatch,
    EngineStatus,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    MemberState,
    MemberStatus,
)
from everlong.contracts.tokens import TokenColumns
from everlong.engines.config import PoolConfig
from everlong.engines.pool import events
from everlong.engines.pool.dispatcher import Dispatcher
from everlong.engines.requests import check_version

LAG_S = 5.0
"""How long an update waits for the slower engines once one holds the version; then they serve with their own until they have it."""
MEANS = ("batch_size_mean", "cache_used")
"""What engines tell of themselves that is no sum."""
OF_ALL = ("busy_s",)
"""What is nothing of a pool where an engine keeps it to itself: seconds of some are not those in which the pool computed."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A request under way."""

    request: GenerateRequest
    placed: asyncio.Future[int]
    """The engine it goes to, or why it goes to none."""
    engine: int | None = None
    error: EngineError | None = None
    """Of the last engine that failed."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class EnginePool:
    """An `Engine`, and a `PooledEngine`. Closing it closes its members."""

    def __init__(self, members: Sequence[Engine], config: PoolConfig) -> None:
        """One engine for each of the config's members, in their order."""
        self.members, self._names = tuple(members), config.names
        self._dispatcher = Dispatcher(
            config.names,
            [member.max_running for member in config.members],
            mismatch_bound=config.mismatch_bound,
            mismatch_tokens=config.mismatch_tokens,
        )
        self._tickets = itertools.count()
        self._flights: dict[int, _Flight] = {}
        self._updates: dict[int, asyncio.Task[None]] = {}
        """By engine."""
        self._update_errors: dict[int, Exception] = {}
        """Of the last update of each engine that failed in it."""
        self._closed = False

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self._check_open()
        ticket = next(self._tickets)
        flight = self._flights[ticket] = _Flight(request, asyncio.get_running_loop().create_future())
        asked = events.Asked(ticket, request.key.episode, request.min_policy_version, self._now_s())
        answered = False
        try:
            self._decide(asked)
            reply = await self._answer(ticket, flight)
            answered = flight.engine is not None
            return reply
        finally:
            del self._flights[ticket]
            if answered:
                self._decide(events.Answered(ticket, len(reply.columns), self._now_s()))
            else:
                self._decide(events.Withdrawn(ticket))

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        flights = [flight for flight in self._flights.values() if flight.request.request_id in request_ids]
        for flight in flights:
            flight.aborted.set()
        engines = sorted({flight.engine for flight in flights if flight.engine is not None})
        await asyncio.gather(*(self.members[engine].abort(request_ids) for engine in engines))

    async def update(self, policy_version: int) -> EngineStatus:
        """Update every member. Returns when those that hold the version within `LAG_S` of the first hold it; the others go
        on loading it. Raises what the members raise where none can have it."""
        self._check_open()
        self._decide(events.VersionWanted(policy_version))
        started = set(self._updates.values())
        while not self._dispatcher.holds(policy_version):
            self._check_open()
            if not (running := set(self._updates.values())):
                raise self._update_error(policy_version)
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if slower := {task for task in started if not task.done()}:
            await asyncio.wait(slower, timeout=LAG_S)
        return await self.status()

    async def status(self) -> EngineStatus:
        """Version and fingerprint of an engine that holds the newest; counts of all; their metrics summed, and each as
        `NAME/metric`."""
        found = await asyncio.gather(*(member.status() for member in self.members), return_exceptions=True)
        told = {name: one for name, one in zip(self._names, found, strict=True) if isinstance(one, EngineStatus)}
        version = self._dispatcher.policy_version
        return EngineStatus(
            policy_version=version,
            fingerprint=next((one.fingerprint for one in told.values() if one.policy_version == version), ""),
            num_running=sum(one.num_running for one in told.values()),
            num_waiting=sum(one.num_waiting for one in told.values()) + self._dispatcher.num_waiting,
            metrics=_metrics(told, len(self.members), self._dispatcher.speeds),
            trouble="; ".join(
                f"engine {member.engine} of the pool is {member.state}: {member.reason}"
                for member in self._dispatcher.members()
                if member.state in (MemberState.LOST, MemberState.FAILED)
            ),
        )

    async def judge(self, mismatch: tuple[EngineMismatch, ...]) -> tuple[MemberStatus, ...]:
        self._decide(events.Measured(mismatch, self._now_s()))
        return self._dispatcher.members()

    async def close(self) -> None:
        """Whoever still waits gets an EngineError."""
        self._closed = True
        for flight in self._flights.values():
            if not flight.placed.done():
                flight.placed.set_exception(EngineError("the engine is closed"))
        await asyncio.gather(*(member.close() for member in self.members))
        updates = [*self._updates.values()]
        for update in updates:
            update.cancel()
        await asyncio.gather(*updates, return_exceptions=True)

    # Requests --------------------------------------------------------------------------------------------------------

    async def _answer(self, ticket: int, flight: _Flight) -> GenerateReply:
        while True:
            engine = await _unless_aborted(flight)
            if engine is None:
                return _nothing_sampled(flight.request)
            flight.engine = engine
            try:
                return _signed(await self.members[engine].generate(flight.request), engine)
            except EngineError as error:
                self._check_open()
                flight.engine, flight.error = None, error
                flight.placed = asyncio.get_running_loop().create_future()
                lost = isinstance(error, EngineLost)
                self._decide(events.Broke(ticket, str(error), self._now_s(), lost))

    def _decide(self, event: events.Event) -> None:
        for action in self._dispatcher.on_event(event):
            match action:
                case events.Send():
                    self._flights[action.ticket].placed.set_result(action.engine)
                case events.Refuse():
                    flight = self._flights[action.ticket]
                    flight.placed.set_exception(self._refusal(flight))
                case events.Update():
                    update = self._update(action.engine, action.policy_version)
                    self._updates[action.engine] = asyncio.create_task(update)

    def _refusal(self, flight: _Flight) -> EngineError:
        """Why nobody takes a request."""
        if flight.error is not None:
            return flight.error
        out = [f"{member.engine} is {member.state}: {member.reason}" for member in self._out()]
        if len(out) == len(self.members):
            return EngineError("no engine of the pool is left; " + "; ".join(out))
        try:
            check_version(flight.request, self._dispatcher.policy_version)
        except StaleWeights as stale:
            return stale
        raise AssertionError("an engine could have taken the request")

    def _out(self) -> list[MemberStatus]:
        return [member for member in self._dispatcher.members() if member.reason]

    # Weights ---------------------------------------------------------------------------------------------------------

    async def _update(self, engine: int, policy_version: int) -> None:
        """Consumes one decision to update; produces what came of it, which may be the next one."""
        self._update_errors.pop(engine, None)
        try:
            await self.members[engine].update(policy_version)
        except Exception as error:  # whatever it is, the others serve on
            self._update_errors[engine] = error
            unreachable = isinstance(error, StaleWeights)
            reason, lost = str(error) or repr(error), isinstance(error, EngineLost)
            event = events.UpdateFailed(engine, reason, unreachable, self._now_s(), lost)
        else:
            event = events.Updated(engine, policy_version, self._now_s())
        self._updates.pop(engine, None)
        if not self._closed:
            self._decide(event)

    def _update_error(self, policy_version: int) -> EngineError:
        errors = self._update_errors
        if not errors:
            return EngineError(f"no engine of the pool is left to hold version {policy_version}: all are quarantined")
        kind = StaleWeights if all(isinstance(error, StaleWeights) for error in errors.values()) else EngineError
        return kind("; ".join(f"{self._names[engine]}: {error}" for engine, error in sorted(errors.items())))

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


async def _unless_aborted(flight: _Flight) -> int | None:
    """The engine that the request goes to; None where it is aborted before. Raises why it goes to none."""
    aborting = asyncio.ensure_future(flight.aborted.wait())
    try:
        await asyncio.wait({flight.placed, aborting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        aborting.cancel()
    if flight.aborted.is_set():
        flight.placed.cancel()
        return None
    return flight.placed.result()


def _signed(reply: GenerateReply, engine: int) -> GenerateReply:
    """The reply with who sampled it on every token."""
    engines = np.full(len(reply.columns), engine, np.int16)
    return msgspec.structs.replace(reply, columns=reply.columns.replace(engines=engines))


def _nothing_sampled(request: GenerateRequest) -> GenerateReply:
    columns = TokenColumns.sampled_tokens([], [], version=[], temperature=request.params.temperature)
    return GenerateReply(request_id=request.request_id, columns=columns, finish_reason=FinishReason.ABORT)


def _metrics(told: Mapping[str, EngineStatus], num_members: int, speeds: Mapping[str, float]) -> dict[str, float]:
    values: dict[str, float] = {f"{engine}/tokens_per_s": speed for engine, speed in speeds.items()}
    for engine, one in told.items():
        own = {**one.metrics, "running": one.num_running, "policy_version": one.policy_version}
        values |= {f"{engine}/{name}": float(value) for name, value in own.items()}
    for name in sorted({name for one in told.values() for name in one.metrics}):
        known = [one.metrics[name] for one in told.values() if name in one.metrics]
        if name not in OF_ALL or len(known) == num_members:
            values[name] = sum(known) / len(known) if name in MEANS else sum(known)
    return values
