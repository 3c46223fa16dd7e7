"""The trainer of one machine: owns masters, moments and the count of batches, and puts versions and checkpoints out.

Heavy work runs in one thread of its own while it holds the compute lease, so that engine and trainer take turns. Over several
ranks there is one such trainer in each process: the first is asked, the others follow what changes the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from everlong.contracts.ports import ObjectStore
from everlong.contracts.records import (
    EngineMismatch,
    MicroBatch,
    PublishedVersion,
    Reconciled,
    ScoredColumns,
    ScoreRequest,
    TrainBatch,
    TrainerStatus,
    TrainReport,
)
from everlong.models.checkpoint import save_checkpoint
from everlong.models.decisions import Replay
from everlong.models.llama.model import Llama
from everlong.models.numerics import Numerics
from everlong.trainer.checkpoint import CheckpointManifest, CheckpointStore
from everlong.trainer.clamp_config import HiddenClamp, WeightClamp
from everlong.trainer.config import (
    AnyKl,
    AnyLoss,
    AnyOptimizer,
    MuonConfig,
    NoKl,
    RatioConfig,
    TrainerConfig,
    check_effective,
    check_projection,
    ignores_staleness,
)
from everlong.trainer.corrections import mismatch_by_engine, mismatch_metrics
from everlong.trainer.critic import PREFIX, Critic
from everlong.trainer.critic_config import CriticConfig
from everlong.trainer.decided import replayed_rows
from everlong.trainer.gradient_clamp import PREFIX as CLAMP_PREFIX
from everlong.trainer.gradient_clamp import HiddenGradientClamp, clamp_weights
from everlong.trainer.kl_config import WITHOUT_KL
from everlong.trainer.objective import Objective
from everlong.trainer.optimizer import MasterOptimizer, learning_rate
from everlong.trainer.preparation import PreparedBatch, PreparedMicroBatch, prepare_batch
from everlong.trainer.ranks.ranks import ALONE, Ranks
from everlong.trainer.reference import ReferencePolicy
from everlong.trainer.replay import check_micro_batch
from everlong.trainer.replay_config import WITHOUT_REPLAY, ReplayConfig, check_replay, check_routers
from everlong.trainer.scoring import score_micro_batch
from everlong.trainer.step import BatchGradient, batch_gradient, deterministic, reference_logprobs, with_own_decisions
from everlong.trainer.tally import Tally
from everlong.trainer.taps import HighestLogits, Taps, tapped
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet, fingerprint

R = TypeVar("R")


class PolicyTrainer:
    """A `Trainer`. The policy version is the number of batches trained."""

    def __init__(
        self,
        model: Llama,
        *,
        config: TrainerConfig,
        loss: AnyLoss,
        ratio: RatioConfig,
        optimizer: AnyOptimizer,
        numerics: Numerics,
        store: ObjectStore,
        publisher: WeightPublisher,
        seed: int,
        lease: asyncio.Lock,
        kl: AnyKl = WITHOUT_KL,
        critic: CriticConfig | None = None,
        replay: ReplayConfig = WITHOUT_REPLAY,
        companions: Mapping[str, bytes] | None = None,
        ranks: Ranks = ALONE,
        threads: int | None = None,
    ) -> None:
        """`seed` is the run's: a checkpoint of a run with another one is refused. `lease` is shared with the engine. `critic`:
        where credit is made of values; then every batch that a policy sampled must bring returns.
        `companions` lie beside the weights in what is exported, by name: the tokenizer and its settings. `threads`: that the
        trainer computes with, where they are not the process's.

        Takes over the model. Raises ValueError where the loss could not change the gradient, and for a replay of what the model
        does not decide.
        """
        check_effective(loss, ratio, config.updates_per_batch, kl)
        check_projection(config, ratio)
        check_replay(replay, config.updates_per_batch, kl)
        check_routers(replay, model.config.decisions, "the network")
        if numerics is not model.numerics:
            raise ValueError(
                f"the model was built with numerics {model.numerics}, the trainer was asked for {numerics}"
            )
        self._model, self._config, self._optimizer_config = model, config, optimizer
        self._objective = Objective(
            loss, ratio, kl, projection=config.logit_projection, shared_prefix=config.shared_prefix
        )
        self._replay = replay
        self._reference = None if isinstance(kl, NoKl) else ReferencePolicy(model, store)
        # a copy, so that a run without checkpoint can start anew in a trainer that has trained
        self._initial = {name: weight.detach().clone() for name, weight in model.trained_weights().items()}
        self._ranks, self._threads = ranks, threads
        self._optimizer = MasterOptimizer(model, optimizer, ranks=ranks)
        self._critic = None if critic is None else Critic(model, critic, optimizer, ranks)
        self._logit_bound = optimizer.qk_clip if isinstance(optimizer, MuonConfig) else None
        clamp, layers = config.gradient_clamp, model.config.num_layers
        self._clamp = HiddenGradientClamp(clamp, layers) if isinstance(clamp, HiddenClamp) else None
        self._checkpoints = CheckpointStore(store, config.checkpoint_keep)
        self._reader = WeightReader(store)
        self._publisher, self._seed, self._lease, self._companions = publisher, seed, lease, companions
        self._num_batches = 0
        self._published: WeightSet | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    async def train(self, batch: TrainBatch) -> TrainReport:
        """Raises ValueError for a batch out of order or one that does not hold together, before anything is changed."""
        return await self._run(lambda: self._train(batch))

    async def score(self, request: ScoreRequest) -> ScoredColumns:
        """Supervised tokens are scored at temperature 1."""
        return await self._run(lambda: self._score(request))

    async def save(self) -> TrainerStatus:
        """Raises AlreadyExists where a checkpoint of this batch holds other weights, StoreError."""
        return await self._run(self._save)

    async def restore(self, num_batches: int | None = None) -> TrainerStatus:
        """Raises StoreError for a damaged checkpoint, naming an older one; ValueError for one of another run or model."""
        return await self._run(lambda: self._restore(num_batches))

    async def reconcile(self) -> Reconciled:
        """Raises ValueError in aligned numerics for weights that differ, and for a version on other frozen weights; StoreError."""
        return await self._run(self._reconcile)

    async def publish(self) -> PublishedVersion:
        """Raises what `WeightPublisher.publish` raises."""
        return await self._run(self._publish)

    async def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face checkpoint, adapters merged and beside it. Raises FileExistsError where the folder is there already."""
        await self._run(lambda: save_checkpoint(self._model, Path(folder), self._companions))

    async def close(self) -> None:
        """What runs is finished first; the trainer takes no more calls. Idempotent."""
        await asyncio.to_thread(self._thread.shutdown)
        self._ranks.close()

    async def _run(self, work: Callable[[], R]) -> R:
        """Do the work in the trainer's thread under the lease, which a cancelled caller keeps until the thread is done."""
        async with self._lease:
            future = asyncio.get_running_loop().run_in_executor(self._thread, lambda: self._in_threads(work))
            try:
                return await asyncio.shield(future)
            finally:
                await asyncio.wait([future])

    def _in_threads(self, work: Callable[[], R]) -> R:
        """With the trainer's number of threads; the lease keeps the engine, which has its own, away."""
        if self._threads is None:
            return work()
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            return work()
        finally:
            torch.set_num_threads(before)

    def follow(self, name: str, argument: Any) -> None:
        """What the first rank's trainer does with the others: `train`, `score`, `save`, `restore` or `reconcile`."""
        work = {
            "train": self._train,
            "score": self._score,
            "save": lambda _: self._state(),
            "restore": self._restore_own,
            "reconcile": lambda _: self._reconcile_own(),
        }
        work[name](argument)

    # In the thread ---------------------------------------------------------------------------------------------------

    def _train(self, batch: TrainBatch) -> TrainReport:
        if batch.batch != self._num_batches:
            raise ValueError(
                f"expected batch {self._num_batches}, got batch {batch.batch}: batches train once each and in order"
            )
        prepared = prepare_batch(batch, self._objective, self._model.config, self._recorded)
        self._refuse_unweighed(prepared)
        self._refuse_untaught(prepared)
        with self._ranks.together("train", batch):
            return self._train_prepared(batch, prepared)

    def _train_prepared(self, batch: TrainBatch, prepared: PreparedBatch) -> TrainReport:
        tally = Tally()
        tally.total("tokens/trained", prepared.num_trained)
        tally.total("tokens/packed", sum(len(micro_batch.columns) for micro_batch in batch.micro_batches))
        num_updates, mismatch = 0, ()
        if prepared.num_trained:
            critic = self._critic if prepared.num_policy else None
            if critic is None or not critic.pretrains:
                num_updates = self._config.updates_per_batch
                mismatch = self._update(prepared, num_updates, tally)
            if critic is not None:
                with deterministic():
                    critic.train(prepared, self._num_batches, tally)
            _tally_records(prepared, self._num_batches, tally, centred=self._objective.ratio.score_centring)
        else:
            tally.mean("loss", 0.0)
            tally.total("batches_without_tokens", 1)
        self._num_batches += 1
        return TrainReport(
            batch=batch.batch,
            policy_version=self._num_batches,
            num_updates=num_updates,
            metrics=tally.metrics(),
            mismatch=mismatch,
        )

    def _update(self, batch: PreparedBatch, num_updates: int, tally: Tally) -> tuple[EngineMismatch, ...]:
        """The optimiser's steps; returns what was measured of each engine of a pool before the first."""
        first: BatchGradient | None = None
        supervised = not any(len(micro_batch.policy_P) for micro_batch in batch.micro_batches)
        if self._replay.routes == "recompute" and not supervised:
            names = self._replay.names(self._model.config.decisions)
            with tally.seconds("routes"), deterministic():
                batch = with_own_decisions(self._model, batch, names, self._ranks)
        reference = None if supervised else self._ask_reference(batch, tally)
        rate = 0.0
        for _ in range(num_updates):
            taps = Taps(self._clamp, self._logits_watch())
            with deterministic(), tapped(self._model, taps):
                step = batch_gradient(
                    self._model, batch, self._objective, None if first is None else first.starts,
                    self._config.head_chunk_tokens, tally, reference, ranks=self._ranks,
                    owners=self._optimizer.owners,
                )  # fmt: skip
            rate = learning_rate(self._optimizer_config, self._optimizer.num_steps, supervised=supervised)
            with tally.seconds("optimizer"):
                norm = self._step(step, taps, rate, tally)
            first = first or step
            tally.mean("loss", step.loss)
            tally.mean("grad_norm", norm)
        assert first is not None
        tally.total("learning_rate", rate)
        behaviour = torch.cat([micro_batch.behaviour_P for micro_batch in batch.micro_batches])
        if not len(behaviour):
            return ()
        mismatch = torch.cat([start.proximal_P for start in first.starts]) - behaviour
        for name, value in mismatch_metrics(mismatch, batch.branches).items():
            tally.total(name, value)
        engines = np.concatenate([numbers_of(micro_batch) for micro_batch in batch.micro_batches])
        began = np.concatenate([versions_at_begin(micro_batch) for micro_batch in batch.micro_batches])
        return mismatch_by_engine(mismatch, engines, self._num_batches - began)

    @property
    def _recorded(self) -> tuple[str, ...]:
        """Decisions that are replayed as their record has them."""
        return self._replay.recorded(self._model.config.decisions)

    def _logits_watch(self) -> HighestLogits | None:
        """Where attention logits are bounded."""
        bounded = self._logit_bound is not None
        return HighestLogits(self._model.config.num_layers, self._model.config.num_heads) if bounded else None

    def _step(self, step: BatchGradient, taps: Taps, rate: float, tally: Tally) -> float:
        """Clamp, clip and update; returns the gradient's norm before it was clipped."""
        clamp, highest_LH = self._config.gradient_clamp, None
        if isinstance(clamp, WeightClamp):
            weights = self._model.trained_weights()
            tally.total("clamp/clamped", clamp_weights(weights, step.gradient, clamp.share, self._ranks))
        if taps.logits is not None and self._logit_bound is not None:
            highest_LH = torch.stack(self._ranks.gather(taps.logits.highest_LH)).amax(0)
            tally.highest("qk_clip/highest", highest_LH)
            tally.mean("qk_clip/clipped", (highest_LH > self._logit_bound).float())
        norm = self._optimizer.step(step.gradient, self._num_batches, rate, highest_LH)
        if self._clamp is not None:
            self._clamp.close_step(self._ranks, tally)
        return norm

    def _ask_reference(self, batch: PreparedBatch, tally: Tally) -> tuple[torch.Tensor, ...] | None:
        if self._reference is None:
            return None
        chunk = self._config.head_chunk_tokens
        with tally.seconds("reference"), deterministic():
            return self._reference.ask(
                lambda: reference_logprobs(self._model, batch, self._objective, chunk, self._ranks)
            )

    def _refuse_unweighed(self, batch: PreparedBatch) -> None:
        """Raises ValueError where tokens of an older policy would train as if the current one had sampled them."""
        why = ignores_staleness(self._objective.loss, self._objective.ratio)
        ages = [ages_of(micro_batch, self._num_batches) for micro_batch in batch.micro_batches]
        oldest = max((int(age.max()) for age in ages if len(age)), default=0)
        if why is not None and oldest > 0:
            raise ValueError(
                f"batch {self._num_batches} holds tokens that are {oldest} policy versions old, and {why}: set "
                "ratio.correction.type, or ratio.base to behaviour with a loss that has a ratio"
            )

    def _refuse_untaught(self, batch: PreparedBatch) -> None:
        """Raises ValueError for returns that no critic reads, and where the critic cannot learn from them."""
        if self._critic is not None:
            self._critic.check(batch)
        elif bool(batch.returns.isfinite().any()):
            raise ValueError(
                "the batch holds returns for a critic, and this trainer has none: build it with one, or leave them out"
            )

    def _score(self, request: ScoreRequest) -> ScoredColumns:
        for index, micro_batch in enumerate(request.micro_batches):
            check_micro_batch(index, micro_batch, self._model.config)
        asked = request.micro_batches if "logprobs" in request.wanted else ()
        replays = [self._replay_of(index, micro_batch) for index, micro_batch in enumerate(asked)]
        with self._ranks.together("score", request):
            return self._score_checked(request, replays)

    def _score_checked(self, request: ScoreRequest, replays: Sequence[Replay | None]) -> ScoredColumns:
        wanted, logprobs, values = request.wanted, None, None
        parts, share = request.micro_batches, self._ranks.share(len(request.micro_batches))
        if "logprobs" in wanted:
            chunk = self._config.head_chunk_tokens
            found = [score_micro_batch(self._model, parts[i], chunk, replays[i]) for i in share]
            logprobs = _joined(self._ranks.gather(found))
        if "values" in wanted and self._critic is not None:
            self._critic.begin()
            values = _joined(self._ranks.gather([self._critic.score(parts[i]) for i in share]))
        return ScoredColumns(
            logprobs=logprobs,
            values=None if values is None else tuple(part.before for part in values),
            values_after=None if values is None else tuple(part.after for part in values),
            policy_version=self._num_batches,
        )

    def _replay_of(self, index: int, micro_batch: MicroBatch) -> Replay | None:
        rows = replayed_rows(index, micro_batch, self._model.config, self._recorded)
        return Replay(rows) if rows else None

    def _save(self) -> TrainerStatus:
        status, critic = self._status(), None
        with self._ranks.together("save", None):
            state = self._state()
        if self._critic is not None:
            weights = self._critic.network.trained_weights()
            critic = fingerprint({name: _raw_of(weight.detach()) for name, weight in weights.items()})
        self._checkpoints.save(self._num_batches, self._seed, status.fingerprint, state, critic)
        return status

    def _state(self) -> dict[str, torch.Tensor]:
        """Everything that the next batch depends on, on the first of all ranks."""
        state = self._optimizer.state()
        if self._critic is not None:
            state |= self._critic.state()
        if self._clamp is not None:
            state |= self._clamp.state()
        return self._ranks.collect(state)

    def _restore(self, num_batches: int | None) -> TrainerStatus:
        status = self._restore_own(num_batches)
        with self._ranks.together("restore", num_batches):
            return status

    def _restore_own(self, num_batches: int | None) -> TrainerStatus:
        numbers = [n for n in self._checkpoints.numbers() if num_batches is None or n <= num_batches]
        if numbers:
            manifest, tensors = self._checkpoints.load(numbers[-1])
            if manifest.seed != self._seed:
                raise ValueError(
                    f"checkpoint {manifest.num_batches} is of a run with seed {manifest.seed}, this run has {self._seed}: "
                    "give each run a store of its own"
                )
            self._load(tensors)
            self._refuse_other_weights(manifest)
        else:
            self._model.load_trained_weights(self._initial)
            self._optimizer.reset()
            if self._critic is not None:
                self._critic.reset()
            if self._clamp is not None:
                self._clamp.reset()
        self._num_batches = numbers[-1] if numbers else 0
        self._published = None
        return self._status()

    def _load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        of_critic = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
        if self._critic is not None:
            self._critic.load_state(of_critic)
            tensors = {name: tensor for name, tensor in tensors.items() if name not in of_critic}
        if self._clamp is not None:
            self._clamp.load_state(tensors)
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(CLAMP_PREFIX)}
        self._optimizer.load_state(tensors)

    def _refuse_other_weights(self, manifest: CheckpointManifest) -> None:
        """A checkpoint holds what trains; what is frozen below it comes from the model's own files, which may have changed."""
        found = self._status().fingerprint
        if found != manifest.fingerprint:
            raise ValueError(
                f"with checkpoint {manifest.num_batches} the policy has the fingerprint {found}, and had {manifest.fingerprint} "
                "when it was saved: the model that the run was started with has changed: restore its files, or, where code built "
                "it, resume on the kind of CPU that it was built on"
            )

    def _reconcile(self) -> Reconciled:
        reconciled = self._reconcile_own()
        with self._ranks.together("reconcile", None):
            return reconciled

    def _reconcile_own(self) -> Reconciled:
        version, trained = self._num_batches, self._status().fingerprint
        if version not in self._reader.versions():
            return Reconciled(policy_version=version, trained=trained, published=None)
        published = self._reader.manifest(version).fingerprint
        if published != trained:
            self._adopt(self._reader.read(version), trained)
        return Reconciled(policy_version=version, trained=trained, published=published)

    def _adopt(self, published: WeightSet, trained: str) -> None:
        """Fast numerics promise no bits on another machine, so weights that were trained again there give way to the published."""
        version, own = published.version, weight_set(self._model, self._num_batches)
        differ = f"policy version {version} has the fingerprint {trained} here, and was published with {fingerprint(published)}"
        if self._model.numerics is Numerics.ALIGNED:
            raise ValueError(
                f"{differ}: numerics=aligned trains to the same bits on the same kind of CPU with the same number of threads: "
                "resume on a machine like the one that the run was on, with as many"
            )
        if fingerprint(own.frozen) != fingerprint(published.frozen):
            raise ValueError(
                f"{differ}, on other frozen weights: restore the model that the run was started with, or, where code built it, "
                "resume on the kind of CPU that it was built on"
            )
        layouts = [{name: (raw.dtype, raw.shape) for name, raw in some.tensors.items()} for some in (own, published)]
        if layouts[0] != layouts[1]:
            raise ValueError(f"{differ}, as weights of another model: restore the model that the run was started with")
        self._optimizer.adopt({name: _tensor_of(raw) for name, raw in published.tensors.items()})
        self._published = published

    def _publish(self) -> PublishedVersion:
        weights = weight_set(self._model, self._num_batches)
        base = self._published if self._published is None or self._published.version < weights.version else None
        published = self._publisher.publish(weights, base)
        self._publisher.retire(published.version, self._checkpoints.numbers)
        self._published = weights
        return published

    def _status(self) -> TrainerStatus:
        return TrainerStatus(
            num_batches=self._num_batches,
            policy_version=self._num_batches,
            fingerprint=fingerprint(weight_set(self._model, self._num_batches)),
        )


def _joined(found: list[list[R]]) -> tuple[R, ...]:
    """What every rank has of its share, in the order of the micro-batches."""
    return tuple(each for own in found for each in own)


def weight_set(model: Llama, version: int) -> WeightSet:
    """The model's weights as bits: a copy of what trains; what is frozen is never written and needs none."""
    return WeightSet(
        version=version,
        tensors={name: _raw_of(weight.detach().clone()) for name, weight in model.trained_weights().items()},
        frozen={name: _raw_of(weight.detach()) for name, weight in model.frozen_weights().items()},
    )


def _raw_of(weight: torch.Tensor) -> RawTensor:
    wide = weight.dtype == torch.float32
    bits = weight.contiguous().view(torch.int32 if wide else torch.int16).numpy()
    dtype = "float32" if wide else "bfloat16"
    return RawTensor(dtype=dtype, shape=tuple(weight.shape), bits=bits.view(np.uint32 if wide else np.uint16))


def _tensor_of(raw: RawTensor) -> torch.Tensor:
    wide = raw.dtype == "float32"
    bits = torch.from_numpy(raw.bits.view(np.int32 if wide else np.int16).copy())
    return bits.view(torch.float32 if wide else torch.bfloat16)


def ages_of(prepared: PreparedMicroBatch, policy_version: int) -> np.ndarray:
    """int32[P]: how many versions ago each trained token that the policy sampled was sampled, by its own version."""
    tokens = prepared.rows.tokens[prepared.policy_P.numpy()]
    return policy_version - prepared.micro_batch.columns.versions[tokens]


def numbers_of(prepared: PreparedMicroBatch) -> np.ndarray:
    """int16[P]: which engine of a pool sampled each trained token that the policy sampled."""
    return prepared.micro_batch.columns.engines[prepared.rows.tokens[prepared.policy_P.numpy()]]


def versions_at_begin(prepared: PreparedMicroBatch) -> np.ndarray:
    """int32[P]: under which version the turn began of each trained token that the policy sampled."""
    columns = prepared.micro_batch.columns
    begins_T = np.diff(columns.sampled, prepend=False)
    begins_T[[segment.start for segment in prepared.micro_batch.segments]] = True
    (starts,) = np.nonzero(begins_T)
    turns_T = np.searchsorted(starts, np.arange(len(columns)), side="right") - 1
    return columns.versions[starts[turns_T[prepared.rows.tokens[prepared.policy_P.numpy()]]]]


def _tally_records(batch: PreparedBatch, policy_version: int, tally: Tally, *, centred: bool) -> None:
    """What the records say of the trained tokens that the policy sampled: their age in versions, their kept sets."""
    if batch.num_policy:
        tally.total("credit/variance", float(batch.credit.double().var(correction=0)))
    for prepared in batch.micro_batches:
        columns, tokens = prepared.micro_batch.columns, prepared.rows.tokens[prepared.policy_P.numpy()]
        ages = torch.from_numpy(ages_of(prepared, policy_version))
        tally.mean("staleness/mean", ages)
        tally.highest("staleness/max", ages)
        tally.mean("credit/mean", prepared.credit_P)
        if centred:
            recorded = np.diff(columns.kept.offsets)[tokens] > 0
            tally.mean("correction/centred", torch.from_numpy(recorded))
        tally.mean("kept/singleton_share", torch.from_numpy(np.diff(columns.kept.offsets)[tokens] == 1))
