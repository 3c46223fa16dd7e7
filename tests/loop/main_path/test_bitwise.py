"""Over whole RL steps, aligned numerics: what the engine recorded is what the trainer computes, and runs repeat, to the bit."""

import asyncio
import time

import numpy as np
import pytest
import torch
from tests.campaign.small_run import make_tasks, small_config

from everlong.cli.compose import LedgerJournal, open_control
from everlong.cli.config import RunConfig, SamplingConfig
from everlong.cli.rendering import make_renderer
from everlong.cli.run_folder import RunFolder
from everlong.contracts.errors import Reason
from everlong.contracts.ports import ExecResult
from everlong.contracts.records import ScoreRequest
from everlong.engines.config import EmbeddedConfig
from everlong.engines.torch_engine.engine import TorchEngine
from everlong.environments.sandboxes.scripted import ScriptedBackend
from everlong.environments.tasks.config import TasksConfig
from everlong.environments.tasks.sources import read_run_tasks
from everlong.environments.tasks.terminal.generate import make_terminal
from everlong.ledger import EpisodeStore, Ledger, LedgerWriter, RunStarted
from everlong.models.adapter_config import LoraConfig
from everlong.models.numerics import Numerics, NumericsUnavailable, self_test
from everlong.models.toy import build_toy
from everlong.observe import MemorySink
from everlong.orchestrator.batches import BatchMaker
from everlong.orchestrator.conductor import Parts, RunConductor
from everlong.orchestrator.config import RoundsConfig, WarmupConfig
from everlong.orchestrator.loop import run
from everlong.orchestrator.schedules import make_scheduler
from everlong.rollouts.gateway.session import SessionLimits
from everlong.rollouts.messages import Message
from everlong.rollouts.runner import EpisodeRunner, Sampling
from everlong.storage import open_store
from everlong.trainer.config import AdamWConfig
from everlong.trainer.trainer import PolicyTrainer
from everlong.trajectories.admission import AdmissionConfig
from everlong.weights import WeightPublisher, WeightReader, fingerprint

NUM_BATCHES, NUM_TURNS = 3, 2


@pytest.fixture(autouse=True, scope="module")
def one_thread_that_can():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        self_test()
    except NumericsUnavailable as refusal:
        pytest.skip(str(refusal))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    make_terminal(folder / "train", 4, kinds=("write-word",))
    return read_run_tasks(TasksConfig(train=(folder / "train",)))


class Talk:
    """A harness that answers whatever the model says, so that every episode has several turns and growing prompts."""

    async def run(self, task, session, sandbox):
        messages = [Message(role="user", content=task.instruction)]
        for turn in range(NUM_TURNS):
            messages.append((await session.chat(messages, ())).message)
            messages.append(Message(role="user", content=f"That was answer {turn}. Go on."))
        return Reason.DONE


def grade_by_attempt(sandbox, command):
    """The policy is untrained: whatever it says, half of a group is paid, so that every group has a gradient."""
    attempt = int(sandbox.name.split("-")[2].split(".")[0])
    sandbox.files["/logs/verifier/reward.txt"] = str(attempt % 2).encode()
    return ExecResult(exit_code=0, output=b"")


def toy(adapter):
    model = build_toy(0, numerics=Numerics.ALIGNED)
    if adapter is not None:
        model.adapt(adapter)
    return model


def model_of(weights, adapter):
    """The toy with these published weights."""
    model = toy(adapter)
    tensors = {
        name: torch.from_numpy(raw.bits.view(np.float32).reshape(raw.shape).copy())
        for name, raw in {**weights.frozen, **weights.tensors}.items()
    }
    model.load_weights(tensors)
    return model


class Steps:
    """Whole RL steps of the toy in this process: sample, pack, train, publish, update the engine, again."""

    def __init__(self, folder, tasks, engine, sampling, adapter=None):
        self.adapter = adapter
        self.folder, self.tasks, self.store = folder, tasks, open_store(str(folder / "store"))
        self.config = RunConfig(engine=engine, sampling=sampling, admission=AdmissionConfig(zero_signal="keep"))
        self.batches = BatchMaker(self.config.credit, self.config.admission, self.config.packing, 0)
        self.episodes = EpisodeStore(self.store)

    def trainer(self, lease, model):
        return PolicyTrainer(
            model,
            config=self.config.trainer,
            loss=self.config.loss,
            ratio=self.config.ratio,
            optimizer=AdamWConfig(learning_rate=1e-3),
            numerics=Numerics.ALIGNED,
            store=self.store,
            publisher=WeightPublisher(self.store, 2),
            seed=0,
            lease=lease,
        )

    async def drive(self):
        ledger = Ledger.open(self.folder / "ledger.db")
        writer, lease = LedgerWriter(ledger), asyncio.Lock()
        await writer.append(RunStarted(seed=0, config_hash="", tasks_hash=""))
        renderer = make_renderer(self.config)
        engine = TorchEngine(
            toy(self.adapter),
            WeightReader(self.store),
            token_bytes=renderer.tokenizer.token_bytes(),
            config=self.config.engine,
            lease=lease,
        )
        runner = EpisodeRunner(
            tasks=self.tasks.by_id(),
            backend=ScriptedBackend(grade_by_attempt),
            harness=Talk(),
            sampling=Sampling(
                engine=engine,
                renderer=renderer,
                params=self.config.sampling.params(renderer.stop_ids),
                run_seed=0,
                limits=SessionLimits(max_turns=NUM_TURNS, max_context=512),
            ),
            journal=LedgerJournal(writer),
        )
        trainer = self.trainer(lease, toy(self.adapter))
        conductor = RunConductor(
            Parts(
                run_episode=runner.run,
                engine=engine,
                trainer=trainer,
                ledger=writer,
                episodes=self.episodes,
                batches=self.batches,
                warmup_batch=None,
                metrics=MemorySink(),
                task_hashes={id: task.task.content_hash for id, task in self.tasks.by_id().items()},
                clock=time.monotonic,
            )
        )
        scheduler = make_scheduler(
            RoundsConfig(num_batches=NUM_BATCHES, groups_per_batch=2, group_size=2, batch_deadline_s=None),
            WarmupConfig(),
            train_tasks=[task.id for task in self.tasks.train],
            eval_tasks=[],
            seed=0,
        )
        try:
            await run(scheduler, conductor, time.monotonic)
        finally:
            await writer.close()
            ledger.close()
            await engine.close()
            await trainer.close()
        self.lifecycle = ledger.lifecycle

    def packed(self, number):
        """What batch `number` was trained on, from the stored episodes."""
        views = self.lifecycle.episodes.values()
        groups = {
            group: [self.episodes.get(v.payload_key, v.payload_hash) for v in views if v.group == group]
            for group in self.lifecycle.batches[number].groups
        }
        return self.batches.make(number, groups)[1].train_batch

    async def largest_difference(self):
        """Between recorded and computed logprobs over all batches, each under the weights that sampled it; and how many."""
        reader, (largest, count) = WeightReader(self.store), (0.0, 0)
        for number in range(NUM_BATCHES):
            trainer = self.trainer(asyncio.Lock(), model_of(reader.read(number), self.adapter))
            batch = self.packed(number)
            scored = await trainer.score(ScoreRequest(micro_batches=batch.micro_batches))
            for micro_batch, logprobs in zip(batch.micro_batches, scored.logprobs, strict=True):
                columns = micro_batch.columns
                assert set(columns.versions[columns.sampled].tolist()) == {number}, "sampled by the version before it"
                difference = np.abs(logprobs[columns.sampled] - columns.logprobs[columns.sampled])
                assert np.isfinite(difference).all()
                largest, count = max(largest, float(difference.max())), count + len(difference)
            await trainer.close()
        return largest, count

    def fingerprints(self):
        reader = WeightReader(self.store)
        return [fingerprint(reader.read(version)) for version in range(NUM_BATCHES + 1)]


PLAIN = SamplingConfig(max_tokens=8)
CUT = SamplingConfig(max_tokens=8, temperature=0.8, top_p=0.9)
"""Records kept sets."""


VARIANTS = [
    *((running, cache, chunk, CUT) for running in (1, 16) for cache in (True, False) for chunk in (16, 512)),
    (1, False, 512, PLAIN),
    (16, True, 16, PLAIN),
]


def name_of(variant):
    running, cache, chunk, sampling = variant
    return f"running-{running}-{'' if cache else 'no-'}cache-chunk-{chunk}-{'plain' if sampling is PLAIN else 'cut'}"


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
async def test_engine_and_trainer_agree_to_the_bit_over_whole_steps(tmp_path, tasks, variant):
    max_running, prefix_cache, chunk, sampling = variant
    engine = EmbeddedConfig(max_running=max_running, prefix_cache=prefix_cache, prefill_chunk_tokens=chunk)
    steps = Steps(tmp_path, tasks, engine, sampling)
    await steps.drive()
    largest, count = await steps.largest_difference()
    assert count > 150, "tokens were compared"
    assert len(set(steps.fingerprints())) == NUM_BATCHES + 1, "every batch changed the weights"
    assert largest == 0.0
    # The engine's settings decide how a token is computed and never which: every variant of a sampling ends alike.
    assert ENDS.setdefault(sampling, steps.fingerprints()) == steps.fingerprints()


@pytest.mark.parametrize("rank", [1, 8])
async def test_engine_and_trainer_agree_to_the_bit_with_adapters(tmp_path, tasks, rank):
    adapter = LoraConfig(rank=rank, alpha=64.0)
    self_test(rank=rank)
    steps = Steps(tmp_path, tasks, EmbeddedConfig(prefill_chunk_tokens=16), CUT, adapter)
    await steps.drive()
    largest, count = await steps.largest_difference()
    assert count > 150 and largest == 0.0
    assert len(set(steps.fingerprints())) == NUM_BATCHES + 1, "every batch changed the adapters"
    first, last = (WeightReader(steps.store).read(version) for version in (0, NUM_BATCHES))
    assert fingerprint(first.frozen) == fingerprint(last.frozen), "and nothing else"


ENDS = {}
"""Fingerprints of every version, by how was sampled."""


async def whole_run(folder, worker):
    """Warm-up, evaluation, RL and evaluation as `everlong train` has them; the fingerprint of every published version."""
    tasks = make_tasks(folder.parent / "tasks", easy=True)
    base = small_config(tasks, folder, "toy", 6)
    schedule = base.schedule.model_copy(update={"num_batches": 2, "groups_per_batch": 2})
    config = base.model_copy(
        update={"worker": worker, "schedule": schedule, "sampling": SamplingConfig(max_tokens=12, temperature=0.8)}
    )
    run_folder = RunFolder(folder)
    run_folder.create(config)
    async with open_control(config, run_folder, MemorySink(), time.monotonic, resume=False) as control:
        await run(control.scheduler, control.conductor, time.monotonic)
    reader = WeightReader(open_store(run_folder.store_url(config)))
    return [fingerprint(reader.read(version)) for version in (6, 7, 8)]


async def test_a_run_ends_in_the_same_weights_twice_and_wherever_its_worker_lives(tmp_path, monkeypatch):
    monkeypatch.setenv(
        "MKL_CBWR", "AVX512,STRICT"
    )  # the cell in this process comes after torch; the self-test has passed
    first = await whole_run(tmp_path / "first", "inline")
    assert await whole_run(tmp_path / "again", "inline") == first
    assert await whole_run(tmp_path / "elsewhere", "process") == first
