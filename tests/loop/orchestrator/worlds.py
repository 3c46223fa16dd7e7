"""A run in one process over real parts: scripted engine and trainer, a real ledger, store and runner, and a death at will."""

import asyncio
import time
from contextlib import asynccontextmanager

import numpy as np

from everlong.cli.compose import LedgerJournal
from everlong.cli.config import RunConfig, SamplingConfig
from everlong.cli.rendering import make_renderer
from everlong.contracts.ports import ExecResult
from everlong.engines.scripted import Fault, ScriptedEngine
from everlong.environments.sandboxes.scripted import ScriptedBackend, interpret
from everlong.ledger import (
    EpisodeStore,
    Ledger,
    LedgerWriter,
    RunFinished,
    RunStarted,
    check_ledger,
)
from everlong.models.config import ScriptedModel
from everlong.observe import MemorySink
from everlong.orchestrator.agenda import is_checkpoint_due
from everlong.orchestrator.batches import BatchMaker
from everlong.orchestrator.conductor import Parts, RunConductor
from everlong.orchestrator.config import RoundsConfig, WarmupConfig, staleness_bound
from everlong.orchestrator.loop import run
from everlong.orchestrator.recovery import interruptions, progress_of
from everlong.orchestrator.schedules import make_scheduler
from everlong.rollouts.config import HarnessConfig
from everlong.rollouts.gateway.session import SessionLimits
from everlong.rollouts.harnesses.bash import BashHarness
from everlong.rollouts.pausing import PausableEngine, Pause
from everlong.rollouts.runner import EpisodeRunner, Sampling
from everlong.storage import open_store
from everlong.trainer.scripted import ScriptedTrainer
from everlong.weights import WeightPublisher, WeightReader

CONFIG = RunConfig(
    model=ScriptedModel(),
    harness=HarnessConfig(system_prompt="", max_turns=3),
    sampling=SamplingConfig(max_tokens=64),
)


class Grader:
    """Grades by the name of the episode, so that every group has both rewards; `wrong` says what else may happen."""

    def __init__(self, wrong=lambda count: ""):
        self.wrong, self.count, self.failures = wrong, 0, 0

    def __call__(self, sandbox, command):
        if command.argv != ("bash", "/tests/test.sh"):
            return interpret(sandbox, command)
        self.count += 1
        match self.wrong(self.count):
            case "silent":
                self.failures += 1
                return ExecResult(exit_code=1, output=b"the grader printed this")
            case "broken":
                self.failures += 1
                raise RuntimeError("the grader exploded")
        attempt = int(sandbox.name.split("-")[2].split(".")[0])
        sandbox.files["/logs/verifier/reward.txt"] = str(attempt % 2).encode()
        return ExecResult(exit_code=0, output=b"")


class StallingEngine(ScriptedEngine):
    """Never answers the episodes in `stalled`."""

    stalled: frozenset[str] = frozenset()

    async def generate(self, request):
        if request.key.episode in self.stalled:
            self.inject(Fault.STALL)
        return await super().generate(request)


class Killed(Exception):
    """Stands for a SIGKILL: whoever raises it writes nothing after it."""


class DyingTrainer(ScriptedTrainer):
    """Dies once, while it trains a batch or after it has saved it."""

    def __init__(self, *args, dies_in="", batch=-1, rounds_otherwise=False, refuses=False):
        """`rounds_otherwise`: than the machine before. `refuses`: what it then finds published, as in aligned numerics."""
        super().__init__(*args)
        self._rounds_otherwise, self._refuses = rounds_otherwise, refuses
        self._dies_in, self._batch, self._last = dies_in, batch, -1

    async def train(self, batch):
        if (self._dies_in, self._batch) == ("train", batch.batch):
            raise Killed
        self._last = batch.batch
        report = await super().train(batch)
        if self._rounds_otherwise:
            self._values = np.nextafter(self._values, np.float32(np.inf))
        return report

    async def reconcile(self):
        reader = WeightReader(self._store)
        if self._refuses and self._rounds_otherwise and self._num_batches and self._num_batches in reader.versions():
            raise ValueError("other bits than published")
        return await super().reconcile()

    async def save(self):
        status = await super().save()
        if (self._dies_in, self._batch) == ("save", self._last):
            raise Killed
        return status


class World:
    """One run's folder, over as many processes as it takes.

    With `late_after` the clock stands at 0, and at 100 from the moment at which so many episodes have ended: a deadline
    then depends on what happened and not on how busy the machine is.
    """

    def __init__(self, folder, tasks, late_after=None, kind=RoundsConfig, **schedule):
        self.folder, self.tasks, self.late_after = folder, tasks, late_after
        deadline = "batch_deadline_s" if kind is RoundsConfig else "group_deadline_s"
        defaults = {"num_batches": 3, "groups_per_batch": 3, "group_size": 4, deadline: None}
        self.schedule = kind(**{**defaults, **schedule})
        self.metrics, self.said = MemorySink(), []

    @asynccontextmanager
    async def process(self, grader=None, stalled=(), before_close=None, **trainer):
        """Opens what a control process opens, and yields its scheduler, conductor and trainer."""
        store = open_store(str(self.folder / "store"))
        ledger = Ledger.open(self.folder / "ledger.db")
        writer = LedgerWriter(ledger)
        renderer, backend = make_renderer(CONFIG), ScriptedBackend(grader or Grader())
        engine = StallingEngine(
            lambda request: [
                *renderer.tokenizer.encode("done" if request.key.turn else "$ echo hi"),
                *renderer.stop_ids,
            ],
            token_bytes=renderer.tokenizer.token_bytes(),
        )
        engine.stalled = frozenset(stalled)
        resume = writer.lifecycle.started is not None
        if not resume:
            await writer.append(RunStarted(seed=0, config_hash="", tasks_hash=""))
        elif left := interruptions(writer.lifecycle):
            await writer.append(*left)
        pause = Pause()
        sampling = Sampling(
            engine=PausableEngine(engine, pause),
            renderer=renderer,
            params=CONFIG.sampling.params(renderer.stop_ids),
            run_seed=0,
            limits=SessionLimits(max_turns=3, max_context=1024),
            pause=pause,
        )
        runner = EpisodeRunner(
            tasks=self.tasks.by_id(),
            backend=backend,
            harness=BashHarness(CONFIG.harness),
            sampling=sampling,
            journal=LedgerJournal(writer),
        )
        policy = DyingTrainer(store, WeightPublisher(store, 4), **trainer)
        self.writer = writer
        conductor = RunConductor(
            Parts(
                run_episode=runner.run,
                engine=engine,
                trainer=policy,
                ledger=writer,
                episodes=EpisodeStore(store),
                batches=BatchMaker(CONFIG.credit, CONFIG.admission, CONFIG.packing, 0, staleness_bound(self.schedule)),
                warmup_batch=None,
                metrics=self.metrics,
                task_hashes={id: task.task.content_hash for id, task in self.tasks.by_id().items()},
                clock=self.clock,
                pause=pause,
                say=self.said.append,
            )
        )
        try:
            if resume:
                await conductor.recover(lambda batch: is_checkpoint_due(batch, self.schedule, WarmupConfig()))
            scheduler = make_scheduler(
                self.schedule,
                WarmupConfig(),
                train_tasks=[task.id for task in self.tasks.train],
                eval_tasks=[],
                seed=0,
                progress=progress_of(writer.lifecycle),
            )
            yield scheduler, conductor, writer, policy
        finally:
            await writer.close()
            ledger.close()

    def clock(self):
        if self.late_after is None:
            return time.monotonic()
        num_ended = sum(bool(view.payload_key) for view in self.writer.lifecycle.episodes.values())
        return 100.0 if num_ended >= self.late_after else 0.0

    async def drive(self, **process):
        """To the end of the run; the final weights."""
        async with self.process(**process) as (scheduler, conductor, writer, trainer):
            await asyncio.wait_for(run(scheduler, conductor, self.clock), 100)
            await writer.append(RunFinished())
            return (await trainer.save()).fingerprint

    def facts(self, kind):
        ledger = Ledger.open(self.folder / "ledger.db")
        try:
            return [entry.fact for entry in ledger.facts() if isinstance(entry.fact, kind)]
        finally:
            ledger.close()

    def lifecycle(self):
        ledger = Ledger.open(self.folder / "ledger.db")
        ledger.close()
        return ledger.lifecycle

    def groups(self):
        return [view.groups for _, view in sorted(self.lifecycle().batches.items())]

    def balance(self):
        report = check_ledger(self.folder)
        assert report.ok, report.problems
        return report.balance
