"""The main loop: wait for what happens, ask what to do, have it done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from everlong.orchestrator.events import Action, Event, Started


class Scheduler(Protocol):
    """Decides. Pure: it never waits, reads no clock and calls nobody."""

    finished: bool

    @property
    def wake_at_s(self) -> float | None: ...

    def on_event(self, event: Event) -> list[Action]: ...


class Conductor(Protocol):
    """Carries out. Every action is begun at once and answered by an event later."""

    def begin(self, action: Action) -> None: ...

    async def next_event(self, wake_at_s: float | None) -> Event:
        """The next event, or a `Tick` at `wake_at_s`. Raises what broke an action that is not an episode's own failure."""
        ...

    async def close(self) -> None: ...


async def run(scheduler: Scheduler, conductor: Conductor, clock: Callable[[], float]) -> None:
    """Drive the run to its end. Consumes events, produces actions; ends when the scheduler has nothing more to ask."""
    event: Event = Started(clock())
    try:
        while True:
            for action in scheduler.on_event(event):
                conductor.begin(action)
            if scheduler.finished:
                return
            event = await conductor.next_event(scheduler.wake_at_s)
    finally:
        await conductor.close()
