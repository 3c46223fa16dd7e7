"""Warm-up batches: oracle traces of the training tasks, played once and kept in the run's store."""

from __future__ import annotations

import asyncio

from blake3 import blake3

from everlong.cli.config import RunConfig
from everlong.contracts.errors import NotFound
from everlong.contracts.ports import ObjectStore, SandboxBackend
from everlong.contracts.records import TrainBatch, decode_record, encode_record
from everlong.contracts.tokens import TokenColumns
from everlong.environments.tasks.harbor import HarborTask
from everlong.environments.tasks.sources import TaskSet
from everlong.environments.tasks.terminal.generate import oracle_commands
from everlong.observe import SILENT, Stages
from everlong.orchestrator.cursor import shown_tasks, traces_of_batch
from everlong.rollouts.oracle import oracle_trace
from everlong.rollouts.renderers.chatml import Renderer
from everlong.rollouts.runner import Harness
from everlong.trajectories.packing import pack_supervised

CONCURRENCY = 8


class OracleTraces:
    def __init__(
        self,
        tasks: TaskSet,
        *,
        renderer: Renderer,
        harness: Harness,
        backend: SandboxBackend,
        store: ObjectStore,
        config: RunConfig,
        stages: Stages = SILENT,
    ) -> None:
        self._stages = stages
        self._tasks, self._renderer, self._harness = tasks, renderer, harness
        self._backend, self._store, self._config = backend, store, config
        self._traces: list[TokenColumns] | None = None

    async def batch(self, number: int) -> TrainBatch:
        """Supervised batch `number`. A trace that comes twice in a batch counts twice."""
        if self._traces is None:
            self._traces = await self._play_all()
        drawn = traces_of_batch(number, self._config.warmup.traces_per_batch, len(self._traces), self._config.seed)
        named = [(f"trace-{place:04d}", self._traces[index]) for place, index in enumerate(drawn)]
        return await asyncio.to_thread(pack_supervised, number, named, self._config.packing)

    async def _play_all(self) -> list[TokenColumns]:
        if not len(self._tasks):
            raise ValueError(
                "a warm-up needs training tasks with a solution: give tasks.train, or set warmup.num_batches to 0"
            )
        key, shown = f"traces/{self._fingerprint()}", tasks_to_show(self._tasks, self._config)
        try:
            return decode_record(await asyncio.to_thread(self._store.get, key), list[TokenColumns])
        except NotFound:
            pass
        limit = asyncio.Semaphore(CONCURRENCY)

        async def play(task: HarborTask) -> TokenColumns:
            async with limit:
                return await oracle_trace(
                    task,
                    oracle_commands(task),
                    renderer=self._renderer,
                    harness=self._harness,
                    backend=self._backend,
                    ttl_s=self._config.sandbox.ttl_s,
                )

        with self._stages.stage(f"playing the oracle traces of {len(shown)} tasks"):
            traces = list(await asyncio.gather(*(play(task) for task in shown)))
        await asyncio.to_thread(self._store.put, key, encode_record(traces))
        return traces

    def _fingerprint(self) -> str:
        shown = f"{self._config.warmup.num_tasks} {self._config.seed}"
        settings = f"{self._tasks.fingerprint} {shown} {self._config.harness!r} {self._config.model!r}"
        return blake3(settings.encode()).hexdigest(16)


def tasks_to_show(tasks: TaskSet, config: RunConfig) -> list[HarborTask]:
    """Those of the training tasks whose oracles the warm-up imitates."""
    num_shown = config.warmup.num_tasks or len(tasks)
    return [tasks[index] for index in shown_tasks(num_shown, len(tasks), config.seed)]
