"""Whole runs with a pool of engines: the same bits as with one engine, and an engine that is wrong is found and left out."""

import time

import numpy as np
import pytest
import torch
from tests.campaign.comparing import facts_of
from tests.campaign.small_run import make_tasks, small_config
from tests.fake_vllm import write_python
from tests.kept_server import processes_of

from everlong.cli import cell
from everlong.cli.compose import open_control
from everlong.cli.config import SamplingConfig
from everlong.cli.run_folder import RunFolder
from everlong.contracts.errors import EngineError
from everlong.contracts.records import MemberState, Purpose
from everlong.engines.config import EmbeddedConfig, PoolConfig, VllmConfig
from everlong.engines.pool import pool
from everlong.ledger import EngineChanged, EpisodeStore, check_ledger, read_lifecycle
from everlong.models.adapter_config import LoraConfig, NoAdapter
from everlong.models.numerics import NumericsUnavailable, self_test
from everlong.observe import MemorySink
from everlong.orchestrator.config import AsyncConfig, PartialConfig
from everlong.orchestrator.events import EpisodeEnded
from everlong.orchestrator.loop import run
from everlong.storage import open_store
from everlong.weights import RawTensor, WeightReader, WeightSet, fingerprint

NUM_WARMUP, NUM_RL = 4, 2
SMALL = EmbeddedConfig(cache_tokens=4096)
PAIR = PoolConfig(members=(SMALL, SMALL), mismatch_tokens=50, mismatch_bound=1e-3)


@pytest.fixture(autouse=True)
def one_thread_that_can(monkeypatch):
    monkeypatch.setenv(
        "MKL_CBWR", "AVX512,STRICT"
    )  # the cell in this process comes after torch; the self-test has passed
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        self_test()
    except NumericsUnavailable as refusal:
        pytest.skip(str(refusal))
    yield
    torch.set_num_threads(before)


class Stale(WeightReader):
    """An engine that says it holds what it was asked for and goes on with the first version that it had."""

    first = None

    def read(self, version, base=None):
        weights = super().read(version, None)
        self.first = self.first or weights.tensors
        return WeightSet(version, self.first)


class Coarse(WeightReader):
    """An engine that computes with weights of the precision of bfloat16."""

    def read(self, version, base=None):
        tensors = super().read(version, None).tensors
        return WeightSet(version, {name: _coarse(raw) for name, raw in tensors.items()})


def _coarse(raw):
    return RawTensor(raw.dtype, raw.shape, raw.bits & np.uint32(0xFFFF0000))


def config_of(folder, engine, worker="inline", num_batches=NUM_RL, **others):
    base = small_config(make_tasks(folder.parent / "tasks", easy=True), folder, "toy", NUM_WARMUP)
    schedule = base.schedule.model_copy(update={"num_batches": num_batches, "groups_per_batch": 2})
    sampling = SamplingConfig(max_tokens=12, temperature=0.8)
    admission = base.admission.model_copy(update={"zero_signal": "keep"})
    return base.model_copy(
        update={
            "worker": worker,
            "schedule": schedule,
            "sampling": sampling,
            "engine": engine,
            "admission": admission,
            **others,
        }
    )


async def drive(config, sink, *, resume=False):
    folder = RunFolder(config.output)
    if not resume:
        folder.create(config)
    async with open_control(config, folder, sink, time.monotonic, resume=resume) as control:
        await run(control.scheduler, control.conductor, time.monotonic)


def fingerprints(config):
    reader = WeightReader(open_store(RunFolder(config.output).store_url(config)))
    return [fingerprint(reader.read(version)) for version in range(NUM_WARMUP, NUM_WARMUP + NUM_RL + 1)]


def samplers(config, after=0):
    """Engines that sampled for the training groups from this number on."""
    store = EpisodeStore(open_store(RunFolder(config.output).store_url(config)))
    views = read_lifecycle(config.output / "ledger.db").episodes.values()
    episodes = [
        store.get(view.payload_key, view.payload_hash)
        for view in views
        if view.purpose is Purpose.TRAIN and view.group >= after
    ]
    return {int(engine) for episode in episodes for turn in episode.turns for engine in turn.sampled.engines}


def changes(config):
    """What the ledger says of engines, in its order."""
    return [(fact.engine, fact.state) for fact in facts_of(config.output) if isinstance(fact, EngineChanged)]


def rows_of(sink):
    """Metrics of every batch that the pool sampled for."""
    rows = [point.values for point in sink.points if point.axis == "batch"]
    return [row for row in rows if "engine/0-embedded/serving" in row]


def mismatches(row):
    """Of the engines that were measured: how the requests fall to them is a matter of their speed."""
    return {row[name] for engine in PAIR.names if (name := f"engine/{engine}/mismatch") in row}


@pytest.mark.parametrize("adapter", [NoAdapter(), LoraConfig(rank=4)], ids=["whole", "adapters"])
async def test_a_run_with_two_engines_ends_in_the_bits_of_a_run_with_one(tmp_path, adapter):
    one = config_of(tmp_path / "one", SMALL, adapter=adapter)
    await drive(one, MemorySink())
    two, sink = config_of(tmp_path / "two", PAIR, worker="process", adapter=adapter), MemorySink()
    await drive(two, sink)
    assert samplers(one) == {-1} and samplers(two) == {0, 1}
    assert fingerprints(two) == fingerprints(one)
    rows = rows_of(sink)
    assert len(rows) == NUM_RL
    for engine in PAIR.names:
        assert {row[f"engine/{engine}/mismatch"] for row in rows} == {0.0}
        assert all(row[f"engine/{engine}/tokens_sampled"] > 0 for row in rows)
    assert changes(two) == [(engine, MemberState.SERVING) for engine in PAIR.names]


@pytest.mark.parametrize("wrong", [Stale, Coarse])
async def test_the_engine_that_is_wrong_is_quarantined_and_no_other(tmp_path, monkeypatch, caplog, wrong):
    readers = iter([wrong, WeightReader])
    monkeypatch.setattr(cell, "WeightReader", lambda store: next(readers)(store))
    config, sink = config_of(tmp_path / "run", PAIR, num_batches=3), MemorySink()
    await drive(config, sink)
    assert dict(changes(config)) == {"0-embedded": MemberState.QUARANTINED, "1-embedded": MemberState.SERVING}
    assert ("1-embedded", MemberState.QUARANTINED) not in changes(config)
    rows = rows_of(sink)
    assert {row["engine/1-embedded/mismatch"] for row in rows if "engine/1-embedded/mismatch" in row} == {0.0}
    quarantined_at = [row["engine/0-embedded/serving"] for row in rows].index(0.0)
    assert rows[quarantined_at]["engine/0-embedded/mismatch"] > PAIR.mismatch_bound
    assert quarantined_at < 2, "a batch follows in which it could sample"
    assert samplers(config, after=2 * (quarantined_at + 1)) == {1}
    message = next(record.message for record in caplog.records if "quarantined" in record.message)
    assert "engine 0-embedded of the pool is quarantined" in message
    assert "engine.mismatch_bound is 0.001" in message and "everlong resume" in message
    assert check_ledger(config.output).ok


async def test_where_every_engine_is_wrong_the_run_stops_and_goes_on_when_one_is_right(tmp_path, monkeypatch):
    config = config_of(tmp_path / "run", PAIR.model_copy(update={"mismatch_tokens": 10}))
    with monkeypatch.context() as broken:
        broken.setattr(cell, "WeightReader", Coarse)
        with pytest.raises(
            EngineError, match=r"no engine of the pool is left, the run stops(.|\n)*1-embedded is quarant"
        ):
            await drive(config, MemorySink())
    stopped = read_lifecycle(config.output / "ledger.db")
    assert stopped.num_trained == NUM_WARMUP + 1, "the batch that showed it is trained and recorded"
    assert not [v for v in stopped.episodes.values() if v.finish_reason is not None and not v.finish_reason.trustworthy]
    sink = MemorySink()
    await drive(config, sink, resume=True)
    assert read_lifecycle(config.output / "ledger.db").num_trained == NUM_WARMUP + NUM_RL
    assert check_ledger(config.output).ok
    assert mismatches(rows_of(sink)[-1]) == {0.0}


class Killed(Exception):
    """Stands for a SIGKILL of the control process."""


class Dying:
    """A conductor that dies when so many training episodes have ended; what was under way writes nothing more."""

    def __init__(self, conductor, num_episodes):
        self._conductor, self._left = conductor, num_episodes
        self.begin, self.close = conductor.begin, conductor.close

    async def next_event(self, wake_at_s):
        event = await self._conductor.next_event(wake_at_s)
        self._left -= isinstance(event, EpisodeEnded) and event.order.purpose is Purpose.TRAIN
        if self._left == 0:
            raise Killed
        return event


async def test_engines_that_were_mended_are_not_judged_by_what_they_sampled_before(tmp_path, monkeypatch):
    config = config_of(tmp_path / "run", PAIR.model_copy(update={"mismatch_tokens": 10}), num_batches=1)
    folder = RunFolder(config.output)
    folder.create(config)
    with monkeypatch.context() as broken:
        broken.setattr(cell, "WeightReader", Coarse)
        async with open_control(config, folder, MemorySink(), time.monotonic, resume=False) as control:
            with pytest.raises(Killed):
                await run(control.scheduler, Dying(control.conductor, 5), time.monotonic)
    sink = MemorySink()
    await drive(config, sink, resume=True)
    (row,) = rows_of(sink)
    assert mismatches(row) == {0.0}
    assert row["mismatch/max"] > 0, "tokens of the wrong engines are among those that train"
    assert {state for _, state in changes(config)} == {MemberState.SERVING}


@pytest.mark.parametrize(
    "schedule", [PartialConfig(completion=0.5), AsyncConfig(max_staleness=2)], ids=lambda s: s.type
)
async def test_a_pool_serves_where_episodes_outlive_updates_and_every_engine_that_is_right_stays(tmp_path, schedule):
    """Both engines are in the process that samples; with `async` the trainer has another."""
    settings = {"num_batches": 4, "groups_per_batch": 2, "group_size": 4, "checkpoint_every": 2}
    schedule, engine = schedule.model_copy(update=settings), PAIR.model_copy(update={"mismatch_bound": 0.3})
    config, sink = config_of(tmp_path / "run", engine, worker="process", schedule=schedule), MemorySink()
    await drive(config, sink)
    assert samplers(config) == {0, 1}
    assert changes(config) == [(engine, MemberState.SERVING) for engine in PAIR.names]
    rows = rows_of(sink)
    assert len(rows) == 4
    assert max(row["staleness/max"] for row in rows) >= 1, "some tokens are older than the weights that they train"
    assert all(0 <= row["idle/engine"] <= 1 for row in rows)
    assert check_ledger(config.output).ok


async def test_an_engine_of_ours_and_a_server_that_dies_serve_one_run_and_no_episode_is_lost(tmp_path, monkeypatch):
    """The server is a fake with a real engine inside."""
    faults = tmp_path / "faults"
    faults.mkdir()
    monkeypatch.setenv("FAKE_VLLM_FAULTS", str(faults))
    monkeypatch.setattr(pool, "LAG_S", 300.0)  # until the server has started
    (faults / "die").touch()
    mixed = PoolConfig(members=(SMALL, VllmConfig(python=write_python(tmp_path))), mismatch_tokens=50)
    config, sink = config_of(tmp_path / "run", mixed).model_copy(update={"numerics": "fast"}), MemorySink()
    config = config.model_copy(update={"schedule": config.schedule.model_copy(update={"num_batches": 4})})
    await drive(config, sink)
    assert not (faults / "die").exists(), "it died"
    assert samplers(config) == {0, 1}, "what it had is asked elsewhere, and an update waits until it is back"
    told = changes(config)
    assert told[0] == ("0-embedded", MemberState.SERVING) and told[-1] == ("1-vllm", MemberState.SERVING)
    assert {state for _, state in told} <= {MemberState.SERVING, MemberState.LOST}
    episodes = read_lifecycle(config.output / "ledger.db").episodes.values()
    assert all(view.finish_reason.trustworthy for view in episodes)
    last = rows_of(sink)[-1]
    assert last["engine/1-vllm/server_losses"] == 1.0
    assert all(last[f"engine/{engine}/mismatch"] < 1e-4 for engine in mixed.names)
    assert check_ledger(config.output).ok
    assert processes_of("tests.fake_vllm", tmp_path) == []
