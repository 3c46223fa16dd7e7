"""Over-commit: never more in memory than allowed, everybody is served, and in the order in which they came."""

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from everlong.contracts.errors import SandboxError
from everlong.contracts.ports import Command, SandboxSpec
from everlong.environments.sandboxes.overcommit import Overcommit, Pause, State, Wake
from everlong.environments.sandboxes.pool import PooledBackend
from everlong.environments.sandboxes.scripted import ScriptedBackend


def opened(policy, *names, at_s=0.0):
    for name in names:
        assert policy.call(name) == [Wake(name)]
        policy.woken(name, at_s)
        policy.end(name, at_s)


def test_who_was_idle_for_long_enough_is_paused_and_wakes_when_called():
    policy = Overcommit(pause_after_s=10.0, max_resident=None)
    opened(policy, "a")
    assert policy.next_tick_s() == 10.0
    assert policy.tick(9.9) == []
    assert policy.tick(10.0) == [Pause("a")]
    assert policy.paused("a") == []
    assert policy.call("a") == [Wake("a")]
    policy.woken("a", 11.0)
    assert policy.state("a") is State.BUSY
    assert policy.tick(1000.0) == []


def test_the_one_idle_for_longest_makes_room():
    policy = Overcommit(pause_after_s=None, max_resident=2)
    opened(policy, "a", at_s=1.0)
    opened(policy, "b", at_s=0.0)
    assert policy.call("c") == [Pause("b")]
    assert policy.paused("b") == [Wake("c")]


def test_a_call_that_comes_while_its_sandbox_is_being_paused_waits_for_both():
    policy = Overcommit(pause_after_s=1.0, max_resident=None)
    opened(policy, "a")
    assert policy.tick(1.0) == [Pause("a")]
    assert policy.call("a") == []
    assert policy.paused("a") == [Wake("a")]


def test_who_gives_up_waiting_leaves_the_line():
    policy = Overcommit(pause_after_s=None, max_resident=2)
    for name in ("a", "b"):
        policy.call(name)
        policy.woken(name, 0.0)
    assert policy.call("c") == []
    assert policy.call("d") == []
    assert policy.end("c", 1.0) == []
    assert policy.gone("a") == [Wake("d")]


@settings(deadline=None)
@given(
    st.integers(2, 4),
    st.sampled_from([None, 3.0]),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=60),
)
def test_any_load_stays_within_the_limit_and_is_served(max_resident, pause_after_s, calls):
    """Calls come at random; work, pausing and waking take a time step each. At the end everybody has been served."""
    policy = Overcommit(pause_after_s, max_resident)
    pending, running, served, waiting = [], [], 0, []
    now = 0.0
    for step in range(1000):
        now = float(step)
        actions, pending = pending, []
        for action in actions:
            pending += policy.paused(action.name) if isinstance(action, Pause) else policy.woken(action.name, now)
        if step < len(calls):
            name, length = f"s{calls[step][0]}", calls[step][1]
            pending += policy.call(name)
            waiting.append((name, length))
        for name, length in list(waiting):
            if policy.state(name) is State.BUSY:
                waiting.remove((name, length))
                running.append((name, step + length))
        for name, end in list(running):
            if end <= step:
                running.remove((name, end))
                served += 1
                pending += policy.end(name, now)
        pending += policy.tick(now)
        assert policy.num_resident <= max_resident
        if step >= len(calls) and not (waiting or running or pending):
            break
    assert served == len(calls)


# The backend that carries it out -------------------------------------------------------------------------------------


class Slow(ScriptedBackend):
    """Counts who is in memory, and lets others run while something happens."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def open(self, spec, files):
        sandbox = super().open(spec, files)
        self.look()
        return sandbox

    def look(self):
        self.most = max(self.most, sum(not sandbox._paused for sandbox in self.sandboxes.values()))


def echo(text):
    return Command(argv=("bash", "-c", f"echo {text} >> log; cat log"), timeout_s=1.0)


async def test_many_sandboxes_share_few_places_and_lose_nothing():
    inner = Slow()
    pool = PooledBackend(inner, pause_after_s=None, max_resident=2)
    sandboxes = await asyncio.gather(*(pool.create(SandboxSpec(name=f"s{n}")) for n in range(8)))

    async def work(sandbox):
        for round_ in range(4):
            result = await sandbox.exec(echo(round_))
            assert result.output.decode().split() == [str(n) for n in range(round_ + 1)]
            await asyncio.sleep(0)

    async with asyncio.timeout(30):
        await asyncio.gather(*(work(sandbox) for sandbox in sandboxes))
        forks = await asyncio.gather(
            *(sandbox.fork(SandboxSpec(name=f"{sandbox.name}-grade")) for sandbox in sandboxes)
        )
    assert [await fork.read("log") for fork in forks] == [b"0\n1\n2\n3\n"] * 8
    assert inner.most <= 2
    assert pool.counts.max_resident == 2
    assert pool.counts.num_pauses >= 6
    for sandbox in (*sandboxes, *forks):
        await sandbox.close()
    assert not inner.sandboxes
    await pool.close()


@pytest.mark.looptime
async def test_a_sandbox_nobody_calls_goes_to_disk_and_comes_back():
    inner = ScriptedBackend()
    pool = PooledBackend(inner, pause_after_s=5.0, max_resident=None)
    sandbox = await pool.create(SandboxSpec(name="a"))
    await asyncio.sleep(4.0)
    await sandbox.write("note", b"x")
    await asyncio.sleep(4.0)
    assert not inner.sandboxes["a"]._paused
    await asyncio.sleep(1.1)
    assert inner.sandboxes["a"]._paused
    assert await sandbox.read("note") == b"x"
    await pool.close()


async def test_a_sandbox_that_cannot_be_made_or_died_says_so_and_frees_its_place():
    inner = ScriptedBackend()
    pool = PooledBackend(inner, pause_after_s=None, max_resident=2)
    with pytest.raises(ValueError):
        await pool.create(SandboxSpec(name="bad", workdir="relative"))
    a = await pool.create(SandboxSpec(name="a"))
    inner.sandboxes["a"].die()
    with pytest.raises(SandboxError, match="died"):
        await a.exec(echo("x"))
    await a.close()
    with pytest.raises(SandboxError, match="is closed"):
        await a.exec(echo("x"))
    b, c = await pool.create(SandboxSpec(name="b")), await pool.create(SandboxSpec(name="c"))
    inner.sandboxes["b"].die()
    d = await pool.create(SandboxSpec(name="d"))  # pausing b fails, which makes room
    assert (await d.exec(echo("d"))).exit_code == 0
    with pytest.raises(SandboxError, match="died"):
        await b.exec(echo("x"))
    for sandbox in (b, c, d):
        await sandbox.close()
    with pytest.raises(ValueError, match="at least 2"):
        PooledBackend(inner, pause_after_s=None, max_resident=1)
