"""What ledger and operator are told of the engines of a pool, and when a run has none left."""

import pytest

from everlong.contracts.errors import EngineError
from everlong.contracts.records import MemberState, MemberStatus
from everlong.ledger import EngineChanged, Ledger, LedgerWriter, RunStarted
from everlong.orchestrator.pool_watch import PoolWatch, member_metrics

JOINING, SERVING = MemberState.JOINING, MemberState.SERVING
FAILED, QUARANTINED = MemberState.FAILED, MemberState.QUARANTINED


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger.open(tmp_path / "ledger.db")
    yield ledger
    ledger.close()


@pytest.fixture
async def writer(ledger):
    writer = LedgerWriter(ledger)
    await writer.append(RunStarted(seed=0, config_hash="", tasks_hash=""))
    yield writer
    await writer.close()


def members(*states):
    reasons = {FAILED: "died", QUARANTINED: "far away"}
    return tuple(
        MemberStatus(engine=f"{n}-vllm", state=state, policy_version=1, reason=reasons.get(state, ""))
        for n, state in enumerate(states)
    )


def recorded(ledger):
    facts = [entry.fact for entry in ledger.facts()]
    return [(fact.engine, fact.state) for fact in facts if isinstance(fact, EngineChanged)]


async def test_only_what_changed_is_told_and_warned_of(ledger, writer, caplog):
    watch = PoolWatch(None, writer)
    for states in ((SERVING, JOINING), (SERVING, SERVING), (SERVING, SERVING), (QUARANTINED, SERVING)):
        await watch.record(members(*states))
    assert recorded(ledger) == [("0-vllm", SERVING), ("1-vllm", JOINING), ("1-vllm", SERVING), ("0-vllm", QUARANTINED)]
    assert [record.message for record in caplog.records] == ["engine 0-vllm of the pool is quarantined: far away"]


@pytest.mark.parametrize("states", [(QUARANTINED, QUARANTINED), (FAILED, QUARANTINED)])
async def test_a_run_without_an_engine_that_is_trusted_stops_once_that_is_recorded(ledger, writer, states):
    watch = PoolWatch(None, writer)
    with pytest.raises(EngineError, match="no engine of the pool is left, the run stops and can be resumed; 0-vllm is"):
        await watch.record(members(*states))
    assert [state for _, state in recorded(ledger)] == list(states)


@pytest.mark.parametrize("states", [(QUARANTINED, SERVING), (QUARANTINED, JOINING), (FAILED, FAILED), ()])
async def test_it_goes_on_while_one_serves_or_may_join_or_all_only_failed(writer, states):
    await PoolWatch(None, writer).record(members(*states))


async def test_a_run_with_one_engine_has_nobody_to_judge(writer):
    assert await PoolWatch(None, writer).judge(()) == ()
    assert member_metrics(()) == {}
