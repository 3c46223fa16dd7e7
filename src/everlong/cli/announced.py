"""A conductor that says, before it begins them, the actions which take long and show no batch."""

from __future__ import annotations

from everlong.contracts.records import Purpose
from everlong.observe import Stages
from everlong.orchestrator import events
from everlong.orchestrator.loop import Conductor


class Announced:
    """Says the first publication and every evaluation, once each; everything else passes through."""

    def __init__(self, conductor: Conductor, stages: Stages) -> None:
        self._conductor, self._stages = conductor, stages
        self._has_published = self._evaluates = False

    def begin(self, action: events.Action) -> None:
        match action:
            case events.Publish() if not self._has_published:
                self._has_published = True
                self._stages.say("publishing the weights, for the first time whole")
            case events.RunEpisode() if action.order.purpose is Purpose.EVAL and not self._evaluates:
                self._evaluates = True
                self._stages.say("evaluating the held-out tasks")
            case events.RecordEval():
                self._evaluates = False
        self._conductor.begin(action)

    async def next_event(self, wake_at_s: float | None) -> events.Event:
        return await self._conductor.next_event(wake_at_s)

    async def close(self) -> None:
        await self._conductor.close()
