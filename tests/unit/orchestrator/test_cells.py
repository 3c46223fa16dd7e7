"""A cell behind a socket behaves as its ports: answers, errors by class, many calls at once, and a death that is told."""

import asyncio
import errno
import gc
import logging
import os
import signal
import sys
import textwrap

import numpy as np
import pytest

from everlong.contracts.errors import StaleWeights, WorkerDied, WorkerError
from everlong.contracts.records import EngineStatus, GenerateRequest, SamplingKey, SamplingParams
from everlong.orchestrator.cells.frames import error_of, failure_of
from everlong.orchestrator.cells.heartbeat import Heartbeat
from everlong.orchestrator.cells.supervisor import WorkerProcess

FACTORY = """
    import asyncio, sys
    from everlong.contracts.errors import StaleWeights
    from everlong.contracts.records import *
    from everlong.contracts.tokens import TokenColumns
    from everlong.orchestrator.cells.worker import Cell

    class Engine:
        def __init__(self): self.aborted = []
        async def generate(self, request):
            if request.request_id == "hang":
                await asyncio.sleep(60)
            if request.request_id == "bug":
                raise KeyError("not in the contract")
            await asyncio.sleep(0.02 if request.request_id == "slow" else 0)
            ids = request.prompt_ids[::-1]
            columns = TokenColumns.sampled_tokens(ids, [-0.5] * len(ids), version=3)
            return GenerateReply(request_id=request.request_id, columns=columns, finish_reason=FinishReason.STOP)
        async def abort(self, ids): self.aborted += ids
        async def update(self, version):
            if version == 9: raise StaleWeights("delta 9 needs base 8")
            return EngineStatus(policy_version=version, fingerprint="f")
        async def status(self):
            return EngineStatus(policy_version=0, fingerprint=",".join(self.aborted), metrics={"torch": float("torch" in sys.modules)})
        async def close(self): pass

    def build(config):
        if open(config).read() == "broken":
            raise ValueError("sampling.top_p must be at most 1, got 2")
        return Cell(Engine(), None)
"""


@pytest.fixture
async def worker(tmp_path):
    (tmp_path / "cell_factory_for_test.py").write_text(textwrap.dedent(FACTORY))
    (tmp_path / "config").write_text("ok")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    process = await WorkerProcess.start(
        factory="cell_factory_for_test:build", config=tmp_path / "config", run_folder=tmp_path, environment=environment
    )
    yield process
    await process.close()


def request(name, ids=(1, 2, 3)):
    key = SamplingKey(run_seed=0, episode="e", turn=0)
    return GenerateRequest(request_id=name, key=key, prompt_ids=np.array(ids, np.int32), params=SamplingParams())


async def test_calls_overtake_each_other_and_each_gets_its_own_answer(worker):
    slow = asyncio.create_task(worker.engine.generate(request("slow", (1, 2))))
    fast = await worker.engine.generate(request("fast", (7, 8, 9)))
    assert not slow.done()
    assert fast.columns.ids.tolist() == [9, 8, 7]
    assert (await slow).columns.ids.tolist() == [2, 1]


async def test_errors_of_the_contract_keep_their_class_and_others_say_where_they_came_from(worker):
    with pytest.raises(StaleWeights, match="needs base 8"):
        await worker.engine.update(9)
    with pytest.raises(WorkerError, match="not in the contract"):
        await worker.engine.generate(request("bug"))
    with pytest.raises(ValueError, match="no trainer"):
        await worker.trainer.save()
    assert (await worker.engine.update(4)) == EngineStatus(policy_version=4, fingerprint="f")


async def test_a_cancelled_call_is_aborted_in_the_worker(worker):
    task = asyncio.create_task(worker.engine.generate(request("hang")))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await worker.engine.status()).fingerprint == "hang"


async def test_a_killed_worker_fails_waiting_and_later_calls_instead_of_hanging(worker):
    waiting = asyncio.create_task(worker.engine.generate(request("hang")))
    await asyncio.sleep(0.05)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="died while the call was waiting"):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(WorkerDied, match="the worker is gone$"):
        await worker.engine.status()


class Told(logging.Handler):
    """What is logged, as it comes."""

    def __init__(self):
        super().__init__()
        self.lines = asyncio.Queue()

    def emit(self, record):
        self.lines.put_nowait(record.getMessage())


@pytest.fixture
def told():
    handler, logger = Told(), logging.getLogger("everlong.orchestrator.cells.heartbeat")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


async def test_a_stopped_worker_is_named_with_what_to_do_and_a_long_turn_is_no_silence(tmp_path, monkeypatch, told):
    """Waits for a silence and for a turn that is longer."""
    monkeypatch.setattr("everlong.orchestrator.cells.remote.BEAT_S", 0.02)
    monkeypatch.setattr("everlong.orchestrator.cells.heartbeat.SILENT_S", 1.0)
    (tmp_path / "cell_factory_for_test.py").write_text(textwrap.dedent(FACTORY))
    (tmp_path / "config").write_text("ok")
    worker = await WorkerProcess.start(
        factory="cell_factory_for_test:build",
        config=tmp_path / "config",
        run_folder=tmp_path,
        environment={"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        name="engine",
    )
    turn = asyncio.create_task(worker.engine.generate(request("hang")))
    await asyncio.wait({turn}, timeout=1.5)
    assert told.empty() and not turn.done()
    os.kill(worker.pid, signal.SIGSTOP)
    silent = await told.get()
    assert silent.startswith(f"nothing was heard from the engine process (pid {worker.pid}) for 1 s")
    assert f"kill -CONT {worker.pid}" in silent and f"everlong resume {tmp_path}" in silent
    assert str(tmp_path / "engine.log") in silent
    os.kill(worker.pid, signal.SIGCONT)
    assert await told.get() == f"the engine process (pid {worker.pid}) answers again"
    turn.cancel()
    await worker.close()


def test_silence_is_counted_in_beats_and_said_once(caplog):
    heartbeat = Heartbeat("the engine process (pid 7)", "look at it")
    beats = [*[False] * 5, True, *[False] * 8, True, True]
    for each in beats:
        heartbeat.beat(each, 10.0)
    assert caplog.messages == [
        "nothing was heard from the engine process (pid 7) for 60 s: look at it",
        "the engine process (pid 7) answers again",
    ]


async def test_a_factory_that_refuses_its_config_says_so_in_the_control_process(tmp_path):
    (tmp_path / "cell_factory_for_test.py").write_text(textwrap.dedent(FACTORY))
    (tmp_path / "config").write_text("broken")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with pytest.raises(ValueError, match="top_p must be at most 1"):
        await WorkerProcess.start(
            factory="cell_factory_for_test:build",
            config=tmp_path / "config",
            run_folder=tmp_path,
            environment=environment,
        )


async def test_a_worker_that_dies_at_its_start_shows_the_end_of_its_log(tmp_path):
    (tmp_path / "dying_cell_for_test.py").write_text("import os; os.write(2, b'no room on this machine'); os._exit(3)")
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with pytest.raises(WorkerDied, match=r"code 3(.|\n)*no room on this machine"):
        await WorkerProcess.start(
            factory="dying_cell_for_test:build", config=tmp_path / "c", run_folder=tmp_path, environment=environment
        )


SLEEPING = "import time; time.sleep(600)"


@pytest.mark.parametrize("moment_s", [0.0, 0.3], ids=["at once", "while it loads"])
async def test_a_start_that_is_cancelled_ends_the_worker_and_complains_of_nothing(tmp_path, monkeypatch, moment_s):
    (tmp_path / "sleeping_cell_for_test.py").write_text(SLEEPING)
    environment = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    pids, complaints, spawned = [], [], asyncio.Event()
    spawn = asyncio.create_subprocess_exec

    async def noted(*argv, **more):
        process = await spawn(*argv, **more)
        pids.append(process.pid)
        spawned.set()
        assert os.getsid(process.pid) != os.getsid(0), "Ctrl-C in our terminal does not reach it"
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
    start = asyncio.create_task(
        WorkerProcess.start(
            factory="sleeping_cell_for_test:build", config=tmp_path / "c", run_folder=tmp_path, environment=environment
        )
    )
    await spawned.wait()
    await asyncio.sleep(moment_s)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    del start
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == []


def test_an_os_error_of_the_worker_is_told_in_words():
    failure = failure_of(1, OSError(errno.ENOSPC, "No space left on device", "/runs/store"))
    error = error_of(failure, "trainer.save")
    assert isinstance(error, OSError) and "no space is left on its disk" in str(error) and "Errno" not in str(error)
