"""Builds the control process of a run from its config: every part, and nothing that a part does not need."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import cast

from blake3 import blake3
from msgspec.structs import replace

from everlong.cli.cell import ENGINE_FACTORY, FACTORY, TRAINER_FACTORY, build_cell
from everlong.cli.config import RunConfig
from everlong.cli.rendering import make_renderer
from everlong.cli.run_folder import RunFolder
from everlong.cli.toml import config_text
from everlong.cli.traces import OracleTraces
from everlong.contracts.ports import Engine, MetricSink, PooledEngine, SandboxBackend, Trainer
from everlong.contracts.records import EpisodeOrder
from everlong.engines.config import PoolConfig
from everlong.environments.grading.grader import open_grader
from everlong.environments.grading.verifier import check_verdict_paths
from everlong.environments.sandboxes.opening import open_backend
from everlong.environments.tasks.sources import RunTasks, read_run_tasks
from everlong.ledger import CallUncounted, EpisodeStore, Ledger, LedgerWriter, RunStarted, TokensDiscarded, TurnSampled
from everlong.models.numerics_env import prepare_process, required_environment
from everlong.models.source import find_model
from everlong.observe import SILENT, Stages
from everlong.orchestrator.agenda import is_checkpoint_due
from everlong.orchestrator.batches import BatchMaker
from everlong.orchestrator.cells.supervisor import WorkerProcess
from everlong.orchestrator.conductor import Parts, RunConductor
from everlong.orchestrator.config import AsyncConfig, staleness_bound
from everlong.orchestrator.recovery import interruptions, progress_of
from everlong.orchestrator.schedules import AnyScheduler, make_scheduler
from everlong.orchestrator.trouble import trouble_told
from everlong.rollouts.gateway.session import SessionLimits
from everlong.rollouts.harnesses.opening import open_harness
from everlong.rollouts.pausing import PausableEngine, Pause
from everlong.rollouts.runner import EpisodeRunner, Sampling
from everlong.storage import open_store


def make_sampling(config: RunConfig, engine: Engine) -> Sampling:
    pause = Pause()
    renderer = make_renderer(config)
    shape = find_model(config.model).shape
    context = config.context(shape.max_positions)
    return Sampling(
        engine=PausableEngine(engine, pause),
        renderer=renderer,
        params=replace(
            config.sampling.params(renderer.stop_ids),
            kept_logprobs=config.ratio.score_centring,
            record=config.replay.recorded(shape.decisions),
        ),
        run_seed=config.seed,
        limits=SessionLimits(max_turns=config.harness.max_turns, max_context=context),
        pause=pause,
        thinking=config.harness.thinking,
    )


@dataclass(frozen=True, slots=True)
class LedgerJournal:
    """Tells the ledger of every sampled token before the agent sees it."""

    ledger: LedgerWriter

    async def turn_sampled(self, order: EpisodeOrder, turn: int, num_tokens: int) -> None:
        await self.ledger.append(
            TurnSampled(episode=order.episode, incarnation=order.incarnation, turn=turn, num_tokens=num_tokens)
        )

    async def tokens_discarded(self, order: EpisodeOrder, num_tokens: int, reason: str) -> None:
        await self.ledger.append(
            TokensDiscarded(episode=order.episode, incarnation=order.incarnation, num_tokens=num_tokens, reason=reason)
        )

    async def call_uncounted(self, order: EpisodeOrder, max_tokens: int, reason: str) -> None:
        await self.ledger.append(
            CallUncounted(episode=order.episode, incarnation=order.incarnation, max_tokens=max_tokens, reason=reason)
        )


@dataclass(frozen=True, slots=True)
class CellPorts:
    """An engine and a trainer, wherever they live."""

    engine: Engine
    trainer: Trainer
    workers: tuple[WorkerProcess, ...] = ()

    def lost(self) -> bool:
        return any(worker.connection.lost.done() for worker in self.workers)

    @property
    def apart(self) -> bool:
        """Whether each has a process of its own."""
        return len(self.workers) > 1


@asynccontextmanager
async def open_cell(
    config: RunConfig, folder: RunFolder, stages: Stages = SILENT, *, apart: bool = False
) -> AsyncGenerator[CellPorts]:
    """Engine and trainer in one cell, in a process of its own or in this one; `apart`: in a process each. The operator is told
    when something of the engine is lost."""
    async with _open_cell(config, folder, stages, apart) as cell, trouble_told(cell.engine):
        yield cell


@asynccontextmanager
async def _open_cell(config: RunConfig, folder: RunFolder, stages: Stages, apart: bool) -> AsyncGenerator[CellPorts]:
    if config.worker == "inline":
        prepare_process(config.numerics)
        with stages.stage(f"loading model {config.model.type}"):
            cell = build_cell(str(folder.config))
        assert cell.engine is not None and cell.trainer is not None
        try:
            yield CellPorts(cell.engine, cell.trainer)
        finally:
            await cell.close()
        return
    async with AsyncExitStack() as stack:

        async def start(factory: str, name: str) -> WorkerProcess:
            with stages.stage(f"starting the {name} process, which loads model {config.model.type}"):
                worker = await WorkerProcess.start(
                    factory=factory,
                    config=folder.config,
                    run_folder=folder.path,
                    environment=required_environment(config.numerics),
                    name=name,
                )
            stack.push_async_callback(worker.close)
            return worker

        if apart:
            engine, trainer = await start(ENGINE_FACTORY, "engine"), await start(TRAINER_FACTORY, "trainer")
            yield CellPorts(engine.engine, trainer.trainer, (engine, trainer))
        else:
            worker = await start(FACTORY, "worker")
            yield CellPorts(worker.engine, worker.trainer, (worker,))


@dataclass(frozen=True, slots=True)
class Control:
    """The control process of a run, ready to be driven."""

    scheduler: AnyScheduler
    conductor: RunConductor
    ledger: LedgerWriter
    trainer: Trainer


@asynccontextmanager
async def open_control(
    config: RunConfig,
    folder: RunFolder,
    metrics: MetricSink,
    clock,
    *,
    resume: bool,
    stages: Stages = SILENT,
    tasks: RunTasks | None = None,
) -> AsyncGenerator[Control]:
    """Everything open and brought to where the ledger says the run stands; closed in the other order. `tasks`: where they were
    read already."""
    tasks = tasks or read_run_tasks(config.tasks)
    async with AsyncExitStack() as stack:
        ledger = Ledger.open(folder.ledger)
        stack.callback(ledger.close)
        writer = LedgerWriter(ledger)
        stack.push_async_callback(writer.close)
        await _announce(writer, config, tasks, resume)
        backend = open_backend(config.sandbox, folder.path)
        stack.push_async_callback(backend.close)
        await check_verdict_paths(tasks.by_id().values(), backend)
        apart = isinstance(config.schedule, AsyncConfig)
        cell = await stack.enter_async_context(open_cell(config, folder, stages, apart=apart))
        conductor = RunConductor(_parts(config, folder, tasks, writer, backend, cell, metrics, clock, stages))
        if resume:
            with stages.stage("restoring the trainer, and training again what its checkpoint lacks"):
                await conductor.recover(lambda batch: is_checkpoint_due(batch, config.schedule, config.warmup))
        else:
            await cell.trainer.restore()
        scheduler = make_scheduler(
            config.schedule,
            config.warmup,
            train_tasks=[task.id for task in tasks.train],
            eval_tasks=[task.id for task in tasks.eval],
            seed=config.seed,
            progress=progress_of(writer.lifecycle),
        )
        yield Control(scheduler, conductor, writer, cell.trainer)


async def _announce(writer: LedgerWriter, config: RunConfig, tasks: RunTasks, resume: bool) -> None:
    """Say that the run starts, or close what a crash left open. Raises ValueError where the tasks are not the run's."""
    tasks_hash = blake3(f"{tasks.train.fingerprint} {tasks.eval.fingerprint}".encode()).hexdigest(16)
    started = writer.lifecycle.started
    if started is None:
        config_hash = blake3(config_text(config).encode()).hexdigest(16)
        await writer.append(RunStarted(seed=config.seed, config_hash=config_hash, tasks_hash=tasks_hash))
    elif started.tasks_hash != tasks_hash:
        raise ValueError(
            "the tasks are not those the run was started with: their files changed or other folders are named. A group's "
            "number stands for a task, so going on would mix two data sets; restore the tasks or start a new run"
        )
    if resume and (left := interruptions(writer.lifecycle)):
        await writer.append(*left)


def _parts(
    config: RunConfig,
    folder: RunFolder,
    tasks: RunTasks,
    writer: LedgerWriter,
    backend: SandboxBackend,
    cell: CellPorts,
    metrics: MetricSink,
    clock,
    stages: Stages,
) -> Parts:
    store = open_store(folder.store_url(config))
    sampling = make_sampling(config, cell.engine)
    harness = open_harness(config.harness)
    runner = EpisodeRunner(
        tasks=tasks.by_id(),
        backend=backend,
        harness=harness,
        sampling=sampling,
        journal=LedgerJournal(writer),
        ttl_s=config.sandbox.ttl_s,
        grader=open_grader(config.grading),
    )
    traces = OracleTraces(
        tasks.train,
        renderer=sampling.renderer,
        harness=harness,
        backend=backend,
        store=store,
        config=config,
        stages=stages,
    )
    return Parts(
        run_episode=runner.run,
        engine=cell.engine,
        trainer=cell.trainer,
        ledger=writer,
        episodes=EpisodeStore(store),
        batches=BatchMaker(
            config.credit, config.admission, config.packing, config.seed, staleness_bound(config.schedule)
        ),
        warmup_batch=traces.batch,
        metrics=metrics,
        task_hashes={id: task.task.content_hash for id, task in tasks.by_id().items()},
        clock=clock,
        say=stages.say,
        worker_lost=cell.lost,
        pause=sampling.pause,
        apart=cell.apart,
        judge=cast("PooledEngine", cell.engine).judge if isinstance(config.engine, PoolConfig) else None,
    )
