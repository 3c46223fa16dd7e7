"""A pool of scripted engines in front of which nobody notices that there are several. The shared suite runs over pools too."""

import asyncio

import msgspec
import numpy as np
import pytest
from tests.engine_contract import TOKEN_BYTES, VOCAB, ask, published

from everlong.contracts.errors import EngineError, EngineLost, StaleWeights
from everlong.contracts.records import EngineMismatch, FinishReason, GenerateRequest, MemberState, SamplingKey
from everlong.engines.config import EmbeddedConfig, PoolConfig
from everlong.engines.pool import pool as pool_module
from everlong.engines.pool.pool import EnginePool
from everlong.engines.scripted import Fault, ScriptedEngine
from everlong.weights import WeightReader


@pytest.fixture(scope="module")
def store():
    return published("memory://")


class Slow(ScriptedEngine):
    """Loads its second version when it is let."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.let = asyncio.Event()

    async def update(self, policy_version):
        if self._version >= 0:
            await self.let.wait()
        return await super().update(policy_version)


def talk(request):
    return np.random.default_rng([request.key.turn, *request.key.episode.encode()]).integers(0, VOCAB, 50)


@pytest.fixture
async def make(store):
    pools = []

    def make(*kinds, **settings):
        members = [kind(talk, WeightReader(store), token_bytes=TOKEN_BYTES) for kind in kinds]
        config = PoolConfig(members=(EmbeddedConfig(),) * len(kinds), **settings)
        pools.append(EnginePool(members, config))
        return pools[-1]

    yield make
    for pool in pools:
        await pool.close()


def of_episode(number, **settings):
    request = ask(request_id=f"r{number}", **settings)
    return GenerateRequest(
        request_id=request.request_id,
        key=SamplingKey(run_seed=1, episode=f"train-{number:06d}-000", turn=0),
        prompt_ids=request.prompt_ids,
        params=request.params,
        min_policy_version=request.min_policy_version,
    )


def engines_of(replies):
    """The one engine of each reply."""
    for reply in replies:
        assert len(set(reply.columns.engines.tolist())) == 1
    return [int(reply.columns.engines[0]) for reply in replies]


async def until(pool, holds):
    for _ in range(10_000):
        await asyncio.sleep(0)
        if holds(await pool.status()):
            return
    raise AssertionError(f"it never came to that: {await pool.status()}")


def far(engine, nats=9.0):
    return (EngineMismatch(engine=engine, age=0, num_tokens=5000, total=5000 * nats),)


async def test_every_token_says_which_engine_sampled_it(make):
    pool = make(ScriptedEngine, ScriptedEngine)
    await pool.update(3)
    replies = await asyncio.gather(*(pool.generate(of_episode(n)) for n in range(8)))
    assert sorted(engines_of(replies)) == [0] * 4 + [1] * 4


async def test_a_request_whose_engine_fails_is_answered_by_another_with_the_same_tokens(make):
    pool = make(ScriptedEngine, ScriptedEngine)
    await pool.update(3)
    expected = await pool.generate(of_episode(0))
    home = engines_of([expected])[0]
    pool.members[home].inject(Fault.FAIL)
    reply = await pool.generate(of_episode(0))
    assert engines_of([reply]) == [1 - home]
    assert reply.columns.ids.tolist() == expected.columns.ids.tolist()
    assert (await pool.status()).num_running == 0


async def test_no_request_of_an_engine_that_dies_is_lost(make):
    pool = make(ScriptedEngine, ScriptedEngine)
    await pool.update(3)
    for member in pool.members:
        member.inject(*[Fault.STALL] * 4)
    tasks = [asyncio.create_task(pool.generate(of_episode(n))) for n in range(8)]
    await until(pool, lambda status: status.num_running == 8)
    await pool.members[0].close()
    pool.members[1].resume()
    replies = await asyncio.gather(*tasks)
    assert [reply.request_id for reply in replies] == [f"r{n}" for n in range(8)]
    assert engines_of(replies) == [1] * 8
    states = [member.state for member in await pool.judge(())]
    assert states == [MemberState.FAILED, MemberState.SERVING]


class Losable(ScriptedEngine):
    """Loses what it has when told, and comes back by an update when it is let."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.gone, self.back = asyncio.Event(), asyncio.Event()
        self.back.set()

    async def generate(self, request):
        answering = asyncio.ensure_future(super().generate(request))
        gone = asyncio.ensure_future(self.gone.wait())
        await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if answering.done():
            return answering.result()
        answering.cancel()
        raise EngineLost("it hangs")

    async def update(self, policy_version):
        await self.back.wait()
        self.gone.clear()
        return await super().update(policy_version)


async def test_what_a_lost_engine_had_is_answered_by_another_and_it_comes_back_with_its_version(make):
    pool = make(Losable, ScriptedEngine)
    await pool.update(3)
    pool.members[0].inject(*[Fault.STALL] * 4)
    tasks = [asyncio.create_task(pool.generate(of_episode(n))) for n in range(8)]
    await until(pool, lambda status: status.num_running == 4)
    pool.members[0].back.clear()
    pool.members[0].gone.set()
    assert engines_of(await asyncio.gather(*tasks)) == [1] * 8
    assert (await pool.status()).trouble == "engine 0-embedded of the pool is lost: it hangs"
    assert (await pool.judge(()))[0].state is MemberState.LOST
    pool.members[0].back.set()
    await until(pool, lambda status: not status.trouble)
    assert (await pool.judge(()))[0].state is MemberState.SERVING


async def test_a_request_that_fails_everywhere_fails_with_what_the_last_engine_said(make):
    pool = make(ScriptedEngine, ScriptedEngine)
    await pool.update(3)
    for member in pool.members:
        member.inject(Fault.FAIL)
    with pytest.raises(EngineError, match="told to fail request r0"):
        await pool.generate(of_episode(0))
    assert len((await pool.generate(of_episode(0))).columns) == 6


async def test_where_every_engine_died_that_is_said_of_each(make):
    pool = make(ScriptedEngine, ScriptedEngine)
    await pool.update(3)
    for member in pool.members:
        await member.close()
    for n in range(4):
        with pytest.raises(EngineError, match="closed"):
            await pool.generate(of_episode(n))
    with pytest.raises(
        EngineError, match="no engine of the pool is left; 0-embedded is failed: .*; 1-embedded is failed: .*closed"
    ):
        await pool.generate(of_episode(9))
    with pytest.raises(EngineError, match="0-embedded: .*1-embedded: "):
        await pool.update(4)


async def test_an_update_does_not_wait_for_an_engine_that_lags_which_serves_with_its_own_version(make, monkeypatch):
    monkeypatch.setattr(pool_module, "LAG_S", 0.0)
    pool = make(Slow, ScriptedEngine)
    await pool.update(3)
    assert (await pool.update(4)).policy_version == 4
    replies = await asyncio.gather(*(pool.generate(of_episode(n)) for n in range(4)))
    versions = [reply.columns.versions.tolist() for reply in replies]
    assert sorted(zip(engines_of(replies), versions, strict=True)) == [(0, [3] * 6)] * 2 + [(1, [4] * 6)] * 2
    needy = await asyncio.gather(*(pool.generate(of_episode(n, min_policy_version=4)) for n in range(4)))
    assert engines_of(needy) == [1] * 4
    pool.members[0].let.set()
    await until(pool, lambda status: status.metrics["0-embedded/policy_version"] == 4.0)


async def test_a_request_that_waits_for_a_version_is_sent_when_it_is_there_and_can_be_aborted_before(make, monkeypatch):
    monkeypatch.setattr(pool_module, "LAG_S", 0.0)
    pool = make(Slow, Slow)
    await pool.update(3)
    updating = asyncio.create_task(pool.update(4))
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(pool.generate(of_episode(n, min_policy_version=4))) for n in range(2)]
    await until(pool, lambda status: status.num_waiting == 2)
    await pool.abort(("r0",))
    reply = await tasks[0]
    assert (reply.finish_reason, len(reply.columns)) == (FinishReason.ABORT, 0)
    pool.members[1].let.set()
    await updating
    assert (await tasks[1]).columns.versions.tolist() == [4] * 6


async def test_a_quarantined_engine_finishes_what_it_has_and_gets_nothing_new(make):
    pool = make(ScriptedEngine, ScriptedEngine)
    await pool.update(3)
    home = engines_of([await pool.generate(of_episode(0))])[0]
    pool.members[home].inject(Fault.STALL)
    task = asyncio.create_task(pool.generate(of_episode(0)))
    await until(pool, lambda status: status.num_running == 1)
    members = await pool.judge(far(home))
    assert members[home].state is MemberState.QUARANTINED
    assert f"{home}-embedded" == members[home].engine and "9.0000 nats" in members[home].reason
    replies = await asyncio.gather(*(pool.generate(of_episode(n)) for n in range(5)))
    assert engines_of(replies) == [1 - home] * 5
    pool.members[home].resume()
    assert engines_of([await task]) == [home]
    await pool.update(4)
    assert (await pool.members[home].status()).policy_version == 3


async def test_the_pool_tells_what_its_engines_tell_summed_and_each(make):
    pool = make(ScriptedEngine, ScriptedEngine)
    await pool.update(3)
    for n in range(5):
        await pool.generate(of_episode(n))
    metrics = (await pool.status()).metrics
    assert metrics["replies"] == 5.0 == metrics["0-embedded/replies"] + metrics["1-embedded/replies"]
    assert metrics["1-embedded/policy_version"] == 3.0


class Telling(ScriptedEngine):
    async def status(self):
        status = await super().status()
        return msgspec.structs.replace(status, metrics={**status.metrics, "busy_s": 2.0})


@pytest.mark.parametrize(("second", "busy_s"), [(Telling, 4.0), (ScriptedEngine, None)], ids=["both", "one"])
async def test_how_long_a_pool_computed_is_known_only_where_every_engine_tells_it(make, second, busy_s):
    pool = make(Telling, second)
    await pool.update(3)
    metrics = (await pool.status()).metrics
    assert (metrics["0-embedded/busy_s"], metrics.get("busy_s")) == (2.0, busy_s)


async def test_a_pool_whose_engines_are_all_out_of_reach_of_a_version_keeps_what_it_had(make):
    pool = make(ScriptedEngine, ScriptedEngine)
    held = await pool.update(3)
    with pytest.raises(StaleWeights, match="0-embedded: .*9.*1-embedded: .*9"):
        await pool.update(9)
    status = await pool.status()
    assert (status.policy_version, status.fingerprint) == (3, held.fingerprint)
