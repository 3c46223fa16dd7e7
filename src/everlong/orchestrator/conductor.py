"""Carries out what the scheduler decided and writes down what came of it, in that order of trust: content, then fact.

An episode's content is stored before the ledger says that it ended; a batch's checkpoint is durable, and its metrics
are written, before the ledger says that it is trained. So whatever the ledger says after a crash is true, and what it does not say is done again.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from everlong.contracts.errors import LedgerError, Reason, WorkerDied
from everlong.contracts.ports import Engine, MetricSink, Trainer
from everlong.contracts.records import Episode, EpisodeOrder, Purpose, Reconciled, TrainBatch, TrainReport, Verdict
from everlong.ledger.episodes import EpisodeStore
from everlong.ledger.facts import (
    BatchClosed,
    BatchTrained,
    EpisodeFinished,
    EpisodeStarted,
    EpisodeState,
    EvalFinished,
    Fact,
    GroupOpened,
    RunResumed,
    VersionPublished,
    WeightsAdopted,
)
from everlong.ledger.facts import (
    EngineUpdated as EngineUpdatedFact,
)
from everlong.ledger.lifecycle import EpisodeView
from everlong.ledger.writer import LedgerWriter
from everlong.observe.console import WARMUP
from everlong.orchestrator import events
from everlong.orchestrator.batches import BatchMaker
from everlong.orchestrator.measuring import batch_metrics, ends, engine_metrics, loss_metrics, signal_metrics
from everlong.orchestrator.outcomes import eval_outcome, replaced_outcome, train_outcomes
from everlong.orchestrator.pool_watch import Judge, PoolWatch, member_metrics, unsigned
from everlong.orchestrator.window import BUSY_S, BatchWindow
from everlong.rollouts.leash import leashed
from everlong.rollouts.pausing import Pause
from everlong.trajectories.packing import PackedBatch

STOP_S = 30.0
"""For an episode to end after its cancellation: its harness has less, then its sandbox closes. Beyond it is left behind."""

WarmupBatch = Callable[[int], Awaitable[TrainBatch]]
"""From the number of a warm-up batch to its supervised samples."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the conductor works with; the CLI chooses each."""

    run_episode: Callable[[EpisodeOrder], Awaitable[Episode]]
    engine: Engine
    trainer: Trainer
    ledger: LedgerWriter
    episodes: EpisodeStore
    batches: BatchMaker
    warmup_batch: WarmupBatch
    metrics: MetricSink
    task_hashes: Mapping[str, str]
    """Content hash of every task by its id."""
    clock: Callable[[], float]
    worker_lost: Callable[[], bool] = field(default=lambda: False)
    """True once a worker process is gone: then no episode's failure is its own."""
    pause: Pause = field(default_factory=Pause)
    """Holds back the turns of the episodes."""
    apart: bool = False
    """Whether engine and trainer have processes, and compute, of their own."""
    say: Callable[[str], None] = field(default=lambda line: None)
    """Takes a line for whoever watches the run."""
    judge: Judge | None = None
    """Of a pool of engines; None where the run has one engine."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A batch, made of the episodes of its groups."""

    groups: Mapping[int, Sequence[Episode]]
    packed: PackedBatch | None
    """None of a supervised batch."""
    metrics: dict[str, float]
    """What the episodes and the packing say, the same whenever it is made again."""


@dataclass(frozen=True, slots=True)
class _Again:
    """A batch that was trained again, and what is to be said of it."""

    batch: int
    values: dict[str, float]
    facts: tuple[Fact, ...]
    compared: bool
    """Whether a published version stands behind it."""


class Stopwatch:
    """Seconds by part, each from the lap before."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._last_s = clock, clock()
        self.seconds: dict[str, float] = defaultdict(float)

    def lap(self, part: str) -> None:
        now_s = self._clock()
        self.seconds[f"seconds/{part}"] += now_s - self._last_s
        self._last_s = now_s


class RunConductor:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._events: asyncio.Queue[events.Event | BaseException] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[str, asyncio.Task[Episode]] = {}
        self._cancelled: dict[str, Reason] = {}
        self._dropped: set[int] = set()
        self._kept: dict[str, Episode] = {}
        self._pool = PoolWatch(parts.judge, parts.ledger)
        self._sampling_since: dict[Purpose, float] = {}
        """When the first episode of the batch or evaluation under way was ordered, or the batch before was closed."""
        self._num_sampled: Counter[Purpose] = Counter()
        """Tokens of the episodes that ended since then."""
        self._window = BatchWindow(parts.clock, apart=parts.apart)

    # Actions ---------------------------------------------------------------------------------------------------------

    def begin(self, action: events.Action) -> None:
        match action:
            case events.RunEpisode():
                self._sampling_since.setdefault(action.order.purpose, self._parts.clock())
                self._spawn(self._run_episode(action.order))
            case events.CancelEpisode():
                self._cancelled[action.episode] = action.reason
                if task := self._running.get(action.episode):
                    task.cancel()
            case events.DropGroup():
                self._spawn(self._drop_group(action.group))
            case events.WarmUp():
                self._spawn(self._warm_up(action))
            case events.TrainGroups():
                self._spawn(self._train_groups(action))
            case events.PauseSampling():
                self._parts.pause.pause()
            case events.ResumeSampling():
                self._parts.pause.resume()
            case events.Publish():
                self._spawn(self._publish())
            case events.UpdateEngine():
                self._spawn(self._update_engine(action.policy_version))
            case events.RecordEval():
                self._spawn(self._record_eval(action))

    async def next_event(self, wake_at_s: float | None) -> events.Event:
        timeout = None if wake_at_s is None else max(0.0, wake_at_s - self._parts.clock())
        try:
            item = await asyncio.wait_for(self._events.get(), timeout)
        except TimeoutError:
            return events.Tick(self._parts.clock())
        if isinstance(item, BaseException):
            raise item
        return item

    async def close(self) -> None:
        """Stop what is under way without recording an end: a resumed run takes it up again."""
        tasks = [*self._running.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, events.Event | None]) -> None:
        async def post() -> None:
            try:
                event = await work
            except Exception as error:
                await self._events.put(error)
            else:
                if event is not None:
                    await self._events.put(event)

        task = asyncio.create_task(post())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began

    # Episodes --------------------------------------------------------------------------------------------------------

    async def _run_episode(self, order: EpisodeOrder) -> events.Event:
        await self._parts.ledger.append(*self._opening_facts(order))
        episode = await self._attempt(order)
        if self._parts.worker_lost():
            raise WorkerDied("a worker process is gone")
        await self._store(episode)
        error = episode.error or episode.verdict.output
        return events.EpisodeEnded(self._parts.clock(), order, episode.reason, episode.reward, error)

    def _opening_facts(self, order: EpisodeOrder) -> list[Fact]:
        facts: list[Fact] = []
        if (order.purpose, order.group) not in self._parts.ledger.lifecycle.groups:
            facts.append(
                GroupOpened(
                    purpose=order.purpose,
                    group=order.group,
                    task=order.task,
                    content_hash=self._parts.task_hashes[order.task],
                )
            )
        facts.append(
            EpisodeStarted(
                episode=order.episode,
                group=order.group,
                attempt=order.attempt,
                purpose=order.purpose,
                task=order.task,
                incarnation=order.incarnation,
            )
        )
        return facts

    async def _attempt(self, order: EpisodeOrder) -> Episode:
        """The episode, or the record of its cancellation. A cancellation that nobody ordered goes on outwards."""
        work = leashed(partial(self._parts.run_episode, order), f"episode {order.episode}", STOP_S)
        task = self._running[order.episode] = asyncio.ensure_future(work)
        if order.episode in self._cancelled:
            task.cancel()
        started = self._parts.clock()
        try:
            return await task
        except asyncio.CancelledError:
            reason = self._cancelled.get(order.episode)
            if reason is None:
                raise
            view = self._parts.ledger.lifecycle.episodes[order.episode]
            return Episode(
                order=order,
                reason=reason,
                verdict=Verdict(reward=None, reason=reason),
                num_discarded=view.num_sampled,
                elapsed_s=self._parts.clock() - started,
                metrics={"uncounted_calls": float(view.uncounted_calls)},
            )
        finally:
            del self._running[order.episode]

    async def _store(self, episode: Episode) -> None:
        order = episode.order
        key, digest = await asyncio.to_thread(self._parts.episodes.put, episode, order.incarnation)
        facts: list[Fact] = [
            EpisodeFinished(
                episode=order.episode,
                incarnation=order.incarnation,
                reason=episode.reason,
                reward=episode.reward,
                num_sampled=episode.num_sampled,
                payload_key=key,
                payload_hash=digest,
                flags=tuple(sorted(set(episode.verdict.flags))),
            )
        ]
        view, dropped = self._parts.ledger.lifecycle.episodes[order.episode], order.group in self._dropped
        if order.purpose is Purpose.EVAL:
            facts.append(eval_outcome(episode, view))
        elif dropped:
            facts.append(replaced_outcome(view))
        await self._parts.ledger.append(*facts)
        self._num_sampled[order.purpose] += episode.num_sampled
        if order.purpose is Purpose.EVAL or not dropped:
            self._kept[order.episode] = episode

    async def _drop_group(self, group: int) -> None:
        """Members that ended, or that a crash interrupted, are cancelled now, the others when they end."""
        self._dropped.add(group)
        idle = (EpisodeState.FINISHED, EpisodeState.INTERRUPTED)
        members = [member for member in self._members(Purpose.TRAIN, group) if member.state in idle]
        for member in members:
            self._kept.pop(member.episode, None)
        await self._parts.ledger.append(*(replaced_outcome(member) for member in members))

    def _members(self, purpose: Purpose, group: int) -> list[EpisodeView]:
        lifecycle = self._parts.ledger.lifecycle
        view = lifecycle.groups.get((purpose, group))
        return [lifecycle.episodes[name] for name in view.episodes] if view else []

    async def _group(self, purpose: Purpose, group: int) -> list[Episode]:
        """The group's episodes that ended, from memory or from the store."""
        episodes = []
        for member in self._members(purpose, group):
            kept = self._kept.pop(member.episode, None)
            if kept is None and member.payload_key:
                get = self._parts.episodes.get
                kept = unsigned(await asyncio.to_thread(get, member.payload_key, member.payload_hash))
            if kept is not None:
                episodes.append(kept)
        return episodes

    # Batches ---------------------------------------------------------------------------------------------------------

    async def recover(self, checkpoint_due: Callable[[int], bool]) -> None:
        """Bring trainer and ledger to the same batch after a crash. Call once, before the loop.

        A checkpoint ahead of the ledger is a batch that was trained but not yet recorded; a checkpoint behind it means
        that batches since then are trained again from their stored episodes. Each is measured again, since the crash
        may have come before its row, and where a checkpoint is due after a batch it is saved. Where other bits come out than were
        published, the published ones are taken up. Nothing is said of a batch before it stands: a published version was compared
        behind it, or there is none.
        """
        status = await self._parts.trainer.restore()
        lifecycle = self._parts.ledger.lifecycle
        # Not `num_trained`, which falls back when batches are trained again: a process may have died while it did so.
        recorded = sum(batch.policy_version is not None for batch in lifecycle.batches.values())
        if status.num_batches > recorded + 1:
            raise LedgerError(
                f"the newest checkpoint holds {status.num_batches} batches, the ledger knows {recorded}: "
                "they belong to different runs"
            )
        behind = min(status.num_batches, recorded)
        await self._parts.ledger.append(RunResumed(num_batches=behind if behind < lifecycle.num_trained else None))
        await self._parts.ledger.append(*self._adopted(await self._parts.trainer.reconcile()))
        untold: list[_Again] = []
        for batch in range(behind, recorded):
            untold.append(await self._train_again(batch, save=checkpoint_due(batch)))
            if untold[-1].compared or batch + 1 == recorded:
                await self._tell(untold)
                untold = []
        if status.num_batches > recorded:
            made = await self._made(recorded, lifecycle.batches[recorded].groups)
            self._parts.metrics.log("batch", recorded, made.metrics)
            await self._record_trained(recorded, made, status.policy_version)

    def _adopted(self, found: Reconciled) -> tuple[Fact, ...]:
        """What the ledger is told where the trainer took up what was published."""
        if found.published is None or not found.adopted:
            return ()
        version = found.policy_version
        self._parts.say(
            f"policy version {version} came out with other bits here than were published, by another CPU or other threads: going on "
            "with the published weights"
        )
        return (WeightsAdopted(version=version, trained=found.trained, published=found.published),)

    async def _tell(self, trained: Sequence[_Again]) -> None:
        for again in trained:
            self._parts.metrics.log("batch", again.batch, again.values)
            await self._parts.ledger.append(*again.facts)

    async def _train_again(self, batch: int, *, save: bool) -> _Again:
        """A batch that the ledger knows as trained: its episodes have their ends."""
        watch = Stopwatch(self._parts.clock)
        made = await self._made(batch, self._parts.ledger.lifecycle.batches[batch].groups)
        again = made.packed.train_batch if made.packed else await self._parts.warmup_batch(batch)
        watch.lap("packing")
        if made.packed:
            again = await self._credited(again, watch)
        report = await self._train(again, False, watch)
        found = await self._parts.trainer.reconcile()
        if save:
            await self._parts.trainer.save()
        adopted = self._adopted(found)
        values = {**made.metrics, **report.metrics, **watch.seconds, "weights_adopted": float(bool(adopted))}
        trained = BatchTrained(batch=batch, policy_version=report.policy_version)
        return _Again(batch, values, (trained, *adopted), compared=found.published is not None)

    async def _made(self, batch: int, groups: Sequence[int]) -> _Made:
        """The batch over these groups, from their episodes; without groups it is a supervised one, not packed here."""
        if not groups:
            return _Made({}, None, {WARMUP: 1.0})
        episodes = {group: await self._group(Purpose.TRAIN, group) for group in groups}
        scored, packed = await asyncio.to_thread(self._parts.batches.make, batch, episodes)
        return _Made(episodes, packed, {**batch_metrics(episodes), **packed.stats, **signal_metrics(scored)})

    async def _warm_up(self, action: events.WarmUp) -> events.Event:
        watch = Stopwatch(self._parts.clock)
        batch = await self._parts.warmup_batch(action.batch)
        watch.lap("traces")
        await self._close_batch(action.batch, ())
        report = await self._train(batch, action.save, watch)
        made = await self._made(action.batch, ())
        self._parts.metrics.log("batch", action.batch, {**made.metrics, **report.metrics, **watch.seconds})
        await self._record_trained(action.batch, made, report.policy_version)
        return events.BatchDone(self._parts.clock(), action.batch, report.policy_version)

    async def _train_groups(self, action: events.TrainGroups) -> events.Event:
        sampling = self._sampling_metrics(Purpose.TRAIN)
        watch = Stopwatch(self._parts.clock)
        engine = engine_metrics(await self._parts.engine.status())
        made = await self._made(action.batch, action.groups)
        assert made.packed is not None
        watch.lap("packing")
        await self._close_batch(action.batch, action.groups)
        batch = await self._credited(made.packed.train_batch, watch)
        report = await self._train(batch, action.save, watch)
        members = await self._pool.judge(report.mismatch)
        window = self._window.close(await self._engine_busy_s(), len(made.packed.train_batch.episodes))
        values = {**made.metrics, **report.metrics, **engine, **sampling, **watch.seconds, **window}
        values |= loss_metrics(self._parts.ledger.lifecycle.loss_by_length_decile())
        values |= member_metrics(members)
        met = {"deadlines": float(action.deadlines), "groups_postponed": float(action.postponed)}
        self._parts.metrics.log("batch", action.batch, {**values, **met})
        await self._record_trained(action.batch, made, report.policy_version)
        await self._pool.record(members)
        return events.BatchDone(self._parts.clock(), action.batch, report.policy_version)

    async def _credited(self, batch: TrainBatch, watch: Stopwatch) -> TrainBatch:
        """The batch with its credit, for which the critic is asked where the credit is made of values."""
        question = self._parts.batches.question(batch)
        if question is None:
            return batch
        watch.lap("recording")
        scores = await self._parts.trainer.score(question)
        batch = await asyncio.to_thread(self._parts.batches.credited, batch, scores)
        watch.lap("scoring")
        return batch

    async def _train(self, batch: TrainBatch, save: bool, watch: Stopwatch) -> TrainReport:
        watch.lap("recording")
        report = await self._parts.trainer.train(batch)
        watch.lap("training")
        if save:
            await self._parts.trainer.save()
            watch.lap("saving")
        self._window.add_training(watch.seconds["seconds/training"] + watch.seconds.get("seconds/saving", 0.0))
        return report

    async def _engine_busy_s(self) -> float | None:
        return (await self._parts.engine.status()).metrics.get(BUSY_S)

    def _sampling_metrics(self, purpose: Purpose) -> dict[str, float]:
        """Seconds since sampling for the batch began, or since the batch before where sampling went on, and tokens per second of
        the episodes that ended in them; nothing where no episode had to run."""
        since, num_sampled = self._sampling_since.pop(purpose, None), self._num_sampled.pop(purpose, 0)
        if since is None:
            return {}
        views, now_s = self._parts.ledger.lifecycle.episodes, self._parts.clock()
        if any(views[name].purpose is purpose for name in self._running):
            self._sampling_since[purpose] = now_s
        seconds = now_s - since
        values = {"seconds/sampling": seconds}
        return {**values, "tokens_per_s": num_sampled / seconds} if seconds > 0 else values

    async def _close_batch(self, batch: int, groups: Sequence[int]) -> None:
        """Say what the batch holds before it is trained; a batch that a crash left closed is not closed again."""
        if batch == len(self._parts.ledger.lifecycle.batches):
            await self._parts.ledger.append(BatchClosed(batch=batch, groups=tuple(groups)))

    async def _record_trained(self, batch: int, made: _Made, policy_version: int) -> None:
        members = [episode for episodes in made.groups.values() for episode in episodes]
        views = self._parts.ledger.lifecycle.episodes
        ended = train_outcomes(members, made.packed.outcomes, views) if made.packed is not None else []
        await self._parts.ledger.append(BatchTrained(batch=batch, policy_version=policy_version), *ended)

    # Weights and evaluation ------------------------------------------------------------------------------------------

    async def _publish(self) -> events.Event:
        began_s = self._parts.clock()
        published = await self._parts.trainer.publish()
        self._window.add_training(self._parts.clock() - began_s)
        known = self._parts.ledger.lifecycle.published_version
        if known is None or published.version > known:
            density = published.num_changed / max(1, published.num_values)
            values = {"delta/size_bytes": float(published.size_bytes), "delta/changed": density}
            self._parts.metrics.log("policy_version", published.version, values)
            await self._parts.ledger.append(
                VersionPublished(
                    version=published.version,
                    base_version=published.base_version,
                    size_bytes=published.size_bytes,
                )
            )
        return events.Published(self._parts.clock(), published.version)

    async def _update_engine(self, policy_version: int) -> events.Event:
        status = await self._parts.engine.update(policy_version)
        self._window.open(status.metrics.get(BUSY_S))
        await self._parts.ledger.append(EngineUpdatedFact(version=status.policy_version))
        return events.EngineUpdated(self._parts.clock(), status.policy_version)

    async def _record_eval(self, action: events.RecordEval) -> events.Event:
        sampling = self._sampling_metrics(Purpose.EVAL)
        episodes = [episode for group in action.groups for episode in await self._group(Purpose.EVAL, group)]
        rewards = [episode.reward for episode in episodes]
        verdicts = [reward for reward in rewards if reward is not None]
        successes = sum(reward >= 1.0 for reward in verdicts)
        judged = {"success": successes / len(verdicts), "reward": float(np.mean(verdicts))} if verdicts else {}
        values = {
            **judged,  # without a verdict there is no success of 0 either
            "episodes": float(len(verdicts)),
            "without_verdict": float(len(rewards) - len(verdicts)),
            "policy_version": float(action.policy_version),
            **ends(episodes),
            **sampling,
        }
        self._parts.metrics.log("eval", action.index, values)
        await self._parts.ledger.append(
            EvalFinished(
                index=action.index,
                policy_version=action.policy_version,
                successes=successes,
                episodes=len(verdicts),
            )
        )
        return events.EvalRecorded(self._parts.clock(), action.index)
