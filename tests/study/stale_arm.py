"""One arm of a study of stability: the toy on a task with stale data, by the trainer and the engine themselves.

The task: a prompt names a step and a letter, and every letter of the answer should lie so many further on than the one before it. The
reward is the share of letters that do. A warm-up imitates demonstrations of which half of the letters are right.

Batch b trains on policy version b. The engine takes up every fifth version, and what it samples under version v trains in the batches
v + 4 to v + 8; the first nine batches are version 0's. So every token is 4 to 8 versions old, but for a few at the beginning.

An arm goes on where it stopped, with the same bits: the trainer restores its checkpoint, and what was waiting is sampled again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from everlong.contracts.config import Config
from everlong.contracts.ports import ObjectStore
from everlong.contracts.records import (
    Episode,
    EpisodeOrder,
    FinishReason,
    GenerateRequest,
    Purpose,
    Reason,
    SamplingKey,
    SamplingParams,
    ScoreRequest,
    TrainBatch,
    Turn,
    Verdict,
)
from everlong.contracts.tokens import KeptSets, TokenColumns
from everlong.engines.config import EmbeddedConfig
from everlong.engines.torch_engine.engine import TorchEngine
from everlong.models.checkpoint import load_checkpoint
from everlong.models.llama.model import Llama
from everlong.models.numerics import Numerics
from everlong.models.toy import build_toy
from everlong.rollouts.renderers.tokenizers import ByteTokenizer
from everlong.storage import open_store
from everlong.trainer.config import (
    AdamWConfig,
    CriticConfig,
    LossConfig,
    OptimizerConfig,
    RatioConfig,
    SapoConfig,
    TrainerConfig,
)
from everlong.trainer.trainer import PolicyTrainer
from everlong.trajectories.admission import AdmissionConfig
from everlong.trajectories.credit import CreditConfig, GaeConfig, GroupMeanConfig, credit_from_values, score_group
from everlong.trajectories.packing import PackingConfig, pack_batch, pack_supervised
from everlong.weights import WeightPublisher, WeightReader

PERIOD, LAG = 5, 4
ALPHABET, STEPS = 16, 3
RIGHT = 0.5
"""Of the letters of a demonstration."""
WARM_TRACES = 32
CHECKPOINT_EVERY = 5 * PERIOD
FIRST = ord("a")
VOCAB = 260


class Arm(Config):
    """What one arm does. Equal arms are one, whoever asks."""

    name: str
    seed: int = 0
    batches: int = 300
    warm_batches: int = 150
    """Of demonstrations, before the first that is sampled."""
    groups: int = 4
    group_size: int = 8
    answer_tokens: int = 16
    top_p: float = 1.0
    replay: bool = True
    """False: kept sets are dropped before training, as a trainer would that does not know them."""
    traces: int | None = None
    """So many demonstrations, the same in every batch, are imitated from the untrained toy, and nothing is sampled."""
    loss: LossConfig = SapoConfig()
    optimizer: OptimizerConfig = AdamWConfig(learning_rate=3e-4)
    trainer: TrainerConfig = TrainerConfig()
    credit: CreditConfig = GroupMeanConfig()
    critic: CriticConfig = CriticConfig(updates_per_batch=1)

    @property
    def key(self) -> str:
        digest = hashlib.sha256(self.model_dump_json().encode()).hexdigest()
        return f"{self.name}-{self.seed}-{digest[:10]}"


class Done(msgspec.Struct):
    seconds: float
    rows: list[dict[str, float]]
    """One for each batch."""


# The task ------------------------------------------------------------------------------------------------------------


def prompt_of(rng: np.random.Generator) -> np.ndarray:
    step, letter = 1 + rng.integers(STEPS), FIRST + rng.integers(ALPHABET)
    return np.array([ord("+"), ord("0") + step, ord(" "), letter], np.int32)


def wanted(prompt: np.ndarray, before: np.ndarray) -> np.ndarray:
    """What should follow each of these letters; what is none has no right follower."""
    step, places = int(prompt[1]) - ord("0"), before - FIRST
    return np.where((places >= 0) & (places < ALPHABET), FIRST + (places + step) % ALPHABET, -1)


def reward_of(prompt: np.ndarray, answer: np.ndarray) -> float:
    return float((answer == wanted(prompt, np.append(prompt[-1:], answer[:-1]))).mean())


def demonstration(rng: np.random.Generator, num_tokens: int) -> TokenColumns:
    prompt, letters = prompt_of(rng), []
    last = prompt[-1:]
    for _ in range(num_tokens):
        wrong = FIRST + rng.integers(ALPHABET)
        last = wanted(prompt, last) if rng.random() < RIGHT else np.array([wrong])
        letters.append(int(last[0]))
    return TokenColumns.context(prompt) + TokenColumns.supervised(letters)


def demonstrations(batch: int, seed: Sequence[int], count: int, num_tokens: int) -> TrainBatch:
    rng = np.random.default_rng(seed)
    traces = [(str(trace), demonstration(rng, num_tokens)) for trace in range(count)]
    return pack_supervised(batch, traces, PackingConfig())


# An arm --------------------------------------------------------------------------------------------------------------


def trainer_of(arm: Arm, model: Llama, store: ObjectStore, lease: asyncio.Lock) -> PolicyTrainer:
    return PolicyTrainer(
        model, config=arm.trainer, loss=arm.loss, ratio=RatioConfig(), optimizer=arm.optimizer, numerics=Numerics.FAST,
        store=store, publisher=WeightPublisher(store, 10), seed=arm.seed, lease=lease,
        critic=arm.critic if isinstance(arm.credit, GaeConfig) else None,
    )  # fmt: skip


async def warm(work: Path, seed: int, num_batches: int) -> Path:
    """The checkpoint from which a seed's arms begin, after so many batches of demonstrations."""
    folder = work / f"warm-{seed}-{num_batches}" / "checkpoint"
    if not folder.exists():
        arm = Arm(name="warm", seed=seed, optimizer=AdamWConfig(learning_rate=2e-3, warmup_steps=20))
        trainer = trainer_of(arm, build_toy(seed), open_store("memory://"), asyncio.Lock())
        for batch in range(num_batches):
            await trainer.train(demonstrations(batch, (seed, 1, batch), WARM_TRACES, arm.answer_tokens))
        await trainer.export(str(folder))
        await trainer.close()
    return folder


class Running:
    """An arm under way in its folder."""

    def __init__(self, arm: Arm, folder: Path | None, start: Path) -> None:
        """Without a folder it keeps nothing."""
        store, lease = open_store("memory://" if folder is None else str(folder / "store")), asyncio.Lock()
        self._arm, self._folder = arm, folder
        begun = build_toy(arm.seed) if arm.traces else load_checkpoint(start, vocab_size=VOCAB)
        self._trainer = trainer_of(arm, begun, store, lease)
        self._engine = TorchEngine(
            build_toy(arm.seed), WeightReader(store), token_bytes=ByteTokenizer().token_bytes(),
            config=EmbeddedConfig(), lease=lease,
        )  # fmt: skip
        self._waiting: dict[int, tuple[TrainBatch, float]] = {}
        self.done = Done(seconds=0.0, rows=[])

    @classmethod
    async def sampled(cls, arm: Arm, start: Path) -> TrainBatch:
        """The first batch of an arm, which nothing trains."""
        running = cls(arm, None, start)
        await running._trainer.publish()
        await running._engine.update(0)
        batch, _ = await running._batch(0, AdmissionConfig(zero_signal="keep"))
        await running._close()
        return batch

    async def run(self) -> Done:
        assert self._folder is not None, "an arm that runs is kept"
        rows = self._folder / "rows.json"
        start = (await self._trainer.restore()).num_batches
        if start:
            found = msgspec.json.decode(rows.read_bytes(), type=Done)
            self.done = Done(seconds=found.seconds, rows=found.rows[:start])
            if not self._arm.traces:
                await self._sample(start - PERIOD)
        for batch in range(start, self._arm.batches):
            began = time.perf_counter()
            row = await self._train(batch)
            self.done.rows.append({"batch": batch, **row})
            self.done.seconds += time.perf_counter() - began
            if (batch + 1) % CHECKPOINT_EVERY == 0:
                rows.write_bytes(msgspec.json.encode(self.done))
                await self._trainer.save()
        await self._close()
        return self.done

    async def _close(self) -> None:
        await self._engine.close()
        await self._trainer.close()

    async def _train(self, batch: int) -> dict[str, float]:
        arm = self._arm
        if arm.traces:
            train = demonstrations(batch, (arm.seed, 2), arm.traces, arm.answer_tokens)
            return (await self._trainer.train(train)).metrics
        if batch % PERIOD == 0:
            await self._trainer.publish()
            await self._sample(batch)
        train, reward = self._waiting.pop(batch)
        if isinstance(arm.credit, GaeConfig):
            scores = await self._trainer.score(ScoreRequest(micro_batches=train.micro_batches, wanted=("values",)))
            train = credit_from_values(train, scores, arm.credit)
        return {"reward": reward, **(await self._trainer.train(train)).metrics}

    async def _sample(self, version: int) -> None:
        """What that version has for the batches to come; those before them wait already, or have trained."""
        await self._engine.update(version)
        trained = len(self.done.rows)
        first = version + LAG if version else 0
        for batch in range(first, min(version + LAG + PERIOD, self._arm.batches)):
            if batch >= trained:
                self._waiting[batch] = await self._batch(batch, AdmissionConfig())

    async def _batch(self, batch: int, admission: AdmissionConfig) -> tuple[TrainBatch, float]:
        """And the mean reward of all its episodes, those that train nowhere too."""
        arm, groups, rewards = self._arm, [], []
        for number in range(batch * arm.groups, (batch + 1) * arm.groups):
            prompt = prompt_of(np.random.default_rng((arm.seed, 3, number)))
            attempts = range(arm.group_size)
            episodes = await asyncio.gather(*(self._episode(number, attempt, prompt) for attempt in attempts))
            groups.append(score_group(number, "chain", episodes, arm.credit))
            rewards += [episode.reward for episode in episodes]
        packed = pack_batch(batch, groups, PackingConfig(), admission, arm.seed).train_batch
        return packed if arm.replay else without_kept_sets(packed), float(np.mean(rewards))

    async def _episode(self, group: int, attempt: int, prompt: np.ndarray) -> Episode:
        arm = self._arm
        order = EpisodeOrder(purpose=Purpose.TRAIN, group=group, attempt=attempt, task="chain")
        request = GenerateRequest(
            request_id=order.episode,
            key=SamplingKey(run_seed=arm.seed, episode=order.episode, turn=0),
            prompt_ids=prompt,
            params=SamplingParams(max_tokens=arm.answer_tokens, top_p=arm.top_p),
        )
        reply = await self._engine.generate(request)
        context = TokenColumns.context(prompt)
        # every answer has its full length, so that none is cut off by it
        turn = Turn(index=0, parent=-1, context=context, sampled=reply.columns, finish_reason=FinishReason.STOP)
        verdict = Verdict(reward=reward_of(prompt, reply.columns.ids))
        return Episode(order=order, reason=Reason.DONE, verdict=verdict, turns=(turn,))


def without_kept_sets(batch: TrainBatch) -> TrainBatch:
    parts = []
    for part in batch.micro_batches:
        columns = part.columns.replace(kept=KeptSets.empty(len(part.columns)))
        parts.append(msgspec.structs.replace(part, columns=columns))
    return msgspec.structs.replace(batch, micro_batches=tuple(parts))


def run_arm(work: Path, arm: Arm) -> Done:
    """What came of the arm, from its file where it has been run."""
    result, folder = work / "done" / f"{arm.key}.json", work / "running" / arm.key
    if not result.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "arm.json").write_text(json.dumps(json.loads(arm.model_dump_json()), indent=2))

        async def run() -> Done:
            start = Path() if arm.traces else await warm(work, arm.seed, arm.warm_batches)
            return await Running(arm, folder, start).run()

        done = asyncio.run(run())
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_bytes(msgspec.json.encode(done))
        shutil.rmtree(folder)
    return msgspec.json.decode(result.read_bytes(), type=Done)
