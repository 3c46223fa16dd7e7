"""Which sandboxes hold memory: decisions only. Events in, actions out, time inside the event.

A sandbox is busy while a call to it runs, idle between calls, paused when its memory was given back. It is paused once it was
idle for `pause_after_s`, or sooner when another one needs its place: at most `max_resident` hold memory. Calls to paused
sandboxes and new sandboxes wait in one line, first come first served; the one that was idle for longest makes room. There is
no deadlock: a busy sandbox ends its call without needing another place, then it is idle and can be paused.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum


class State(Enum):
    ABSENT = "absent"
    """Not there yet: its first call makes it."""
    WAKING = "waking"
    BUSY = "busy"
    IDLE = "idle"
    PAUSING = "pausing"
    PAUSED = "paused"

    @property
    def resident(self) -> bool:
        return self not in (State.ABSENT, State.PAUSED)


@dataclass(frozen=True, slots=True)
class Pause:
    name: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Resume it, or make it if it is new; answer with `woken`."""

    name: str


Action = Pause | Wake


@dataclass(slots=True)
class _Member:
    state: State = State.ABSENT
    num_calls: int = 0
    """Running or waiting."""
    idle_since_s: float = math.inf


class Overcommit:
    """`pause_after_s`: None pauses only to make room. `max_resident`: None is no limit."""

    def __init__(self, pause_after_s: float | None, max_resident: int | None) -> None:
        self._pause_after_s = math.inf if pause_after_s is None else pause_after_s
        self._max_resident = math.inf if max_resident is None else max_resident
        self._members: dict[str, _Member] = {}
        self._line: deque[str] = deque()

    @property
    def num_resident(self) -> int:
        return sum(member.state.resident for member in self._members.values())

    def state(self, name: str) -> State:
        return self._members[name].state if name in self._members else State.ABSENT

    def call(self, name: str) -> list[Action]:
        """Somebody calls the sandbox. It may go on once its state is BUSY."""
        member = self._members.setdefault(name, _Member())
        member.num_calls += 1
        if member.state is State.IDLE:
            member.state = State.BUSY
        elif member.state in (State.ABSENT, State.PAUSED, State.PAUSING) and name not in self._line:
            self._line.append(name)
        return self._serve()

    def end(self, name: str, now_s: float) -> list[Action]:
        """A call ended, or whoever waited gave up."""
        member = self._members.get(name)
        if member is None:
            return []
        member.num_calls -= 1
        if member.num_calls == 0:
            if member.state is State.BUSY:
                member.state, member.idle_since_s = State.IDLE, now_s
            elif name in self._line:
                self._line.remove(name)
            if member.state is State.ABSENT:
                del self._members[name]
        return self._serve()

    def woken(self, name: str, now_s: float) -> list[Action]:
        member = self._members.get(name)
        if member is not None:
            member.state = State.BUSY if member.num_calls else State.IDLE
            member.idle_since_s = now_s
        return self._serve()

    def paused(self, name: str) -> list[Action]:
        member = self._members.get(name)
        if member is not None:
            member.state = State.PAUSED
        return self._serve()

    def gone(self, name: str) -> list[Action]:
        """It was closed, or broke."""
        self._members.pop(name, None)
        if name in self._line:
            self._line.remove(name)
        return self._serve()

    def tick(self, now_s: float) -> list[Action]:
        """Pause who was idle for long enough."""
        due = [name for name, member in self._members.items() if now_s >= self._due_s(member)]
        return [self._pause(name) for name in due] + self._serve()

    def next_tick_s(self) -> float:
        """When `tick` has something to do; infinity for never."""
        return min((self._due_s(member) for member in self._members.values()), default=math.inf)

    def _due_s(self, member: _Member) -> float:
        return member.idle_since_s + self._pause_after_s if member.state is State.IDLE else math.inf

    def _serve(self) -> list[Action]:
        actions: list[Action] = []
        while self._line and self.num_resident < self._max_resident:
            name = next((name for name in self._line if self._members[name].state is not State.PAUSING), None)
            if name is None:
                break
            self._line.remove(name)
            self._members[name].state = State.WAKING
            actions.append(Wake(name))
        leaving = sum(member.state is State.PAUSING for member in self._members.values())
        idle = sorted(
            (member.idle_since_s, name) for name, member in self._members.items() if member.state is State.IDLE
        )
        actions += [self._pause(name) for _, name in idle[: max(0, len(self._line) - leaving)]]
        return actions

    def _pause(self, name: str) -> Pause:
        self._members[name].state = State.PAUSING
        return Pause(name)
