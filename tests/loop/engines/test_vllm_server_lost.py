"""A vLLM server that dies, refuses or never comes: no request is lost, no weights are mistaken. The server is a fake process."""

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from tests.engine_contract import CONTEXT, HELD_TOKENS, SHAPE, TOKEN_BYTES, VOCAB, ask, hold, published
from tests.fake_vllm import write_python
from tests.kept_server import processes_of

from everlong.contracts.errors import EngineError, EngineLost
from everlong.contracts.records import MemberState
from everlong.engines.config import PoolConfig, VllmConfig
from everlong.engines.pool.pool import EnginePool
from everlong.engines.vllm_engine import client, pulse
from everlong.engines.vllm_engine.engine import VllmEngine
from everlong.engines.vllm_engine.server import GivenServer, ServedModel, StartedServer
from everlong.storage import open_store
from everlong.weights import WeightReader


@pytest.fixture(scope="module")
def store_url(tmp_path_factory):
    url = str(tmp_path_factory.mktemp("store"))
    published(url)
    return url


@pytest.fixture
def faults(tmp_path, monkeypatch):
    folder = tmp_path / "faults"
    folder.mkdir()
    monkeypatch.setenv("FAKE_VLLM_FAULTS", str(folder))
    return folder


@pytest.fixture
def impatient(monkeypatch):
    """Who hangs is found out within seconds."""
    monkeypatch.setattr(client, "QUESTION_TIMEOUT_S", 1.0)
    monkeypatch.setattr(pulse, "ASK_EVERY_S", 0.05)


async def until(holds):
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110  # what changes is in another process
            await asyncio.sleep(0.05)


def stop_servers(folder):
    pids = processes_of("tests.fake_vllm", folder)
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)


def engine_before(server, settings, store_url, pooled=False):
    return VllmEngine(
        server,
        WeightReader(open_store(store_url)),
        store_url=store_url,
        token_bytes=TOKEN_BYTES,
        context=CONTEXT,
        config=settings,
        pooled=pooled,
    )


@pytest.fixture
async def engine(tmp_path, store_url, faults):
    settings = VllmConfig(python=write_python(tmp_path), max_restarts=1)
    model = ServedModel({**SHAPE.to_hf(), "vocab_size": VOCAB}, "float32", CONTEXT)
    server = StartedServer(settings, model, log=tmp_path / "vllm.log", threads=1)
    engine = engine_before(server, settings, store_url)
    yield engine
    await engine.close()


async def test_requests_whose_server_dies_are_answered_by_the_next_one_with_the_same_weights(engine, faults):
    await engine.update(3)
    expected = await engine.generate(ask(max_tokens=8))
    (faults / "die").touch()
    replies = await asyncio.gather(*(engine.generate(ask(max_tokens=8, request_id=f"r{n}")) for n in range(3)))
    assert [reply.request_id for reply in replies] == ["r0", "r1", "r2"]
    for reply in replies:
        assert reply.columns.ids.tolist() == expected.columns.ids.tolist()
        assert reply.columns.versions.tolist() == [3] * 8
    status = await engine.status()
    assert (status.policy_version, status.num_running, status.metrics["server_losses"]) == (3, 0, 1.0)


async def test_an_update_starts_a_server_that_died_between_two_requests(engine, tmp_path):
    await engine.update(3)
    for pid in processes_of("tests.fake_vllm", tmp_path):
        os.kill(pid, signal.SIGKILL)
    assert (await engine.update(4)).policy_version == 4
    assert (await engine.generate(ask())).columns.versions.tolist() == [4] * 6


async def test_a_server_that_never_comes_back_is_reported_with_the_end_of_its_log(engine, faults):
    await engine.update(3)
    (faults / "die").touch()
    (faults / "unready").touch()
    with pytest.raises(EngineError, match=r"lost 2 times in a row(.|\n)*told to end before it is ready"):
        await engine.generate(ask())
    with pytest.raises(EngineError, match="lost 2 times in a row"):
        await engine.generate(ask())


async def test_an_update_that_the_server_refuses_leaves_the_old_weights_and_the_next_one_works(engine, faults):
    held = await engine.update(3)
    before = await engine.generate(ask())
    (faults / "refuse").touch()
    with pytest.raises(EngineError, match="told to refuse this update"):
        await engine.update(4)
    assert (await engine.status()).fingerprint == held.fingerprint
    assert (await engine.generate(ask())).columns == before.columns
    assert (await engine.update(4)).policy_version == 4


async def test_a_request_that_runs_survives_an_update_that_is_refused(engine, faults):
    await engine.update(3)
    task = await hold(engine)
    (faults / "refuse").touch()
    with pytest.raises(EngineError):
        await engine.update(4)
    assert (await task).columns.versions.tolist() == [3] * HELD_TOKENS


async def test_the_kept_set_of_a_truncated_token_comes_back_over_the_wire(engine):
    await engine.update(3)
    columns = (await engine.generate(ask(top_k=3, max_tokens=5))).columns
    assert np.diff(columns.kept.offsets).tolist() == [3] * 5


async def test_no_process_and_no_folder_outlives_an_engine_that_is_closed(engine, tmp_path):
    await engine.update(3)
    (pid,) = processes_of("tests.fake_vllm", tmp_path)
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    folder = Path(words[words.index("--uds") + 1]).parent
    assert folder.exists()
    await engine.close()
    assert processes_of("tests.fake_vllm", tmp_path) == []
    assert not folder.exists()


async def test_a_server_that_nobody_runs_is_waited_for_and_then_named(store_url, unused_tcp_port):
    url = f"http://127.0.0.1:{unused_tcp_port}"
    settings = VllmConfig(url=url, max_restarts=0, start_timeout_s=0.5)
    engine = engine_before(GivenServer(url, settings.start_timeout_s), settings, store_url)
    with pytest.raises(EngineError, match=f"no vLLM server answers at {url}"):
        await engine.update(3)
    await engine.close()


async def test_requests_of_a_server_that_hangs_are_answered_by_the_next_one(engine, tmp_path, impatient):
    await engine.update(3)
    expected = await engine.generate(ask(max_tokens=8))
    stop_servers(tmp_path)
    tasks = [asyncio.create_task(engine.generate(ask(max_tokens=8, request_id=f"r{n}"))) for n in range(3)]
    async with asyncio.timeout(60):
        told = await engine.status()
        while not told.trouble:
            await asyncio.sleep(0.05)
            told = await engine.status()
        replies = await asyncio.gather(*tasks)
    assert "the vLLM server hangs" in told.trouble and "started again" in told.trouble and "vllm.log" in told.trouble
    assert [reply.columns.ids.tolist() for reply in replies] == [expected.columns.ids.tolist()] * 3
    status = await engine.status()
    assert (status.trouble, status.metrics["server_losses"]) == ("", 1.0)


async def test_an_update_of_a_server_that_hangs_is_done_by_the_next_one(engine, tmp_path, impatient):
    await engine.update(3)
    stop_servers(tmp_path)
    async with asyncio.timeout(60):
        assert (await engine.update(4)).policy_version == 4


async def test_a_server_that_is_slow_but_says_that_it_lives_is_left_alone(engine, impatient, monkeypatch):
    """Nothing of an answer comes while the server's weights change, for longer than it may be silent."""
    await engine.update(3)
    await engine._client.post("/pause?mode=keep")
    task = asyncio.create_task(engine.generate(ask()))
    answered = 0

    async def counted(answers=client.VllmClient.answers):
        nonlocal answered
        came = await answers(engine._client)
        answered += came
        return came

    monkeypatch.setattr(engine._client, "answers", counted)
    await until(lambda: answered > 2 * pulse.MAX_UNANSWERED)
    assert not task.done()
    await engine._client.post("/resume")
    assert len((await task).columns) == 6
    assert (await engine.status()).metrics["server_losses"] == 0.0


async def test_the_status_of_a_server_that_hangs_is_that_of_what_is_known(engine, tmp_path, impatient):
    held = await engine.update(3)
    stop_servers(tmp_path)
    async with asyncio.timeout(20):
        status = await engine.status()
    assert (status.policy_version, status.fingerprint) == (3, held.fingerprint)
    assert status.metrics == {"server_losses": 0.0}


async def test_in_a_pool_requests_of_a_server_that_hangs_are_asked_elsewhere_while_it_is_brought_back(
    tmp_path, store_url, impatient
):
    folders = [tmp_path / name for name in "ab"]
    engines = []
    for folder in folders:
        folder.mkdir()
        settings = VllmConfig(python=write_python(folder), max_restarts=1)
        model = ServedModel({**SHAPE.to_hf(), "vocab_size": VOCAB}, "float32", CONTEXT)
        server = StartedServer(settings, model, log=folder / "vllm.log", threads=1)
        engines.append(engine_before(server, settings, store_url, pooled=True))
    pool = EnginePool(engines, PoolConfig(members=(VllmConfig(), VllmConfig())))
    try:
        await pool.update(3)
        await until(lambda: not pool._updates)
        stop_servers(folders[0])
        async with asyncio.timeout(60):
            replies = await asyncio.gather(*(pool.generate(ask(request_id=f"r{n}")) for n in range(4)))
            assert [reply.columns.engines.tolist() for reply in replies] == [[1] * 6] * 4
            while (status := await pool.status()).metrics["0-vllm/server_losses"] == 0 or status.trouble:
                assert not status.trouble or "0-vllm of the pool is lost: the vLLM server hangs" in status.trouble
                await asyncio.sleep(0.05)
        assert [member.state for member in await pool.judge(())] == [MemberState.SERVING] * 2
        assert (await engines[0].generate(ask())).columns.versions.tolist() == [3] * 6
    finally:
        await pool.close()


async def test_in_a_pool_a_server_that_hangs_in_an_update_lets_its_requests_go(tmp_path, store_url, faults, impatient):
    settings = VllmConfig(python=write_python(tmp_path), max_restarts=1)
    model = ServedModel({**SHAPE.to_hf(), "vocab_size": VOCAB}, "float32", CONTEXT)
    server = StartedServer(settings, model, log=tmp_path / "vllm.log", threads=1)
    engine = engine_before(server, settings, store_url, pooled=True)
    try:
        await engine.update(3)
        stop_servers(tmp_path)
        updating = asyncio.create_task(engine.update(4))
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            with pytest.raises(EngineLost, match="hangs"):
                await engine.generate(ask())
            with pytest.raises(EngineLost, match="hangs"):
                await updating
            assert (await engine.update(4)).policy_version == 4
        assert (await engine.status()).metrics["server_losses"] == 1.0
    finally:
        await engine.close()
