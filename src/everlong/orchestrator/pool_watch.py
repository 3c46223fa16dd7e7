"""How the engines of a pool stand, as ledger and operator are told of it, and the end of a run that has none left."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import numpy as np

from everlong.contracts.errors import EngineError
from everlong.contracts.records import EngineMismatch, Episode, MemberState, MemberStatus
from everlong.contracts.tokens import NO_ENGINE, TokenColumns
from everlong.ledger.facts import EngineChanged
from everlong.ledger.writer import LedgerWriter

Judge = Callable[[tuple[EngineMismatch, ...]], Awaitable[tuple[MemberStatus, ...]]]
_LOG = logging.getLogger(__name__)


class PoolWatch:
    """Compares how every engine stands with how it stood before."""

    def __init__(self, judge: Judge | None, ledger: LedgerWriter) -> None:
        """`judge` is None where a run has one engine: then there is nothing to watch."""
        self._judge, self._ledger = judge, ledger
        self._known: dict[str, MemberState] = {}

    async def judge(self, mismatch: tuple[EngineMismatch, ...]) -> tuple[MemberStatus, ...]:
        """Hand on what training measured; none of a run with one engine."""
        return () if self._judge is None else await self._judge(mismatch)

    async def record(self, members: Sequence[MemberStatus]) -> None:
        """Say what changed. Raises EngineError where one is quarantined and none is left to serve: the run stops, resumable."""
        changed = [member for member in members if self._known.get(member.engine) is not member.state]
        self._known |= {member.engine: member.state for member in changed}
        for member in changed:
            if member.reason and member.state is not MemberState.LOST:  # that is said at once, see `trouble.py`
                _LOG.warning("engine %s of the pool is %s: %s", member.engine, member.state, member.reason)
        await self._ledger.append(*(_fact(member) for member in changed))
        states = {member.state for member in members}
        if MemberState.QUARANTINED in states and not any(state.hopeful for state in states):
            reasons = "; ".join(f"{member.engine} is {member.state}: {member.reason}" for member in members)
            raise EngineError(f"no engine of the pool is left, the run stops and can be resumed; {reasons}")


def unsigned(episode: Episode) -> Episode:
    """Without who sampled its tokens. Of one that an earlier process of the run stored: its engines may have been mended since, and
    those of this process are judged by what they sample themselves."""
    turns = tuple(msgspec.structs.replace(turn, sampled=_unsigned(turn.sampled)) for turn in episode.turns)
    return msgspec.structs.replace(episode, turns=turns)


def _unsigned(columns: TokenColumns) -> TokenColumns:
    return columns.replace(engines=np.full(len(columns), NO_ENGINE, np.int16))


def member_metrics(members: Sequence[MemberStatus]) -> dict[str, float]:
    """Of each engine: whether it serves, and its mean mismatch in nats per token over so many measured tokens."""
    values: dict[str, float] = {}
    for member in members:
        values[f"engine/{member.engine}/serving"] = float(member.state is MemberState.SERVING)
        if member.mismatch is not None:
            values[f"engine/{member.engine}/mismatch"] = member.mismatch
            values[f"engine/{member.engine}/measured_tokens"] = float(member.num_measured)
    return values


def _fact(member: MemberStatus) -> EngineChanged:
    return EngineChanged(
        engine=member.engine,
        state=member.state,
        mismatch=member.mismatch,
        num_measured=member.num_measured,
        reason=member.reason,
    )
