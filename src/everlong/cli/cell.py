"""What stands behind the ports in a worker: a cell with an engine and a trainer that take turns, or one with either.

The factories' paths are what the control process names.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from everlong.cli.config import RunConfig
from everlong.cli.rendering import checkpoint_companions, make_renderer
from everlong.cli.run_folder import RunFolder
from everlong.cli.started_model import refuse_other_model
from everlong.contracts.ports import Engine, ObjectStore, Trainer
from everlong.contracts.records import GenerateRequest
from everlong.engines.config import EmbeddedConfig, PoolConfig, VllmConfig
from everlong.models.adapter_config import LoraConfig
from everlong.models.config import (
    FolderModel,
    HubModel,
    ModelConfig,
    ScriptedModel,
    Smollm2Model,
    ToyModel,
    ToyMoeModel,
)
from everlong.models.moe.config import MoeConfig
from everlong.models.source import ModelSource, find_model
from everlong.orchestrator.cells.worker import Cell
from everlong.orchestrator.config import AsyncConfig
from everlong.rollouts.renderers.chatml import Renderer
from everlong.storage import open_store
from everlong.trajectories.credit import GaeConfig
from everlong.weights import WeightPublisher, WeightReader

if TYPE_CHECKING:
    from everlong.models.llama.model import Llama
    from everlong.trainer.ranks.ranks import Ranks
    from everlong.trainer.trainer import PolicyTrainer

FACTORY = "everlong.cli.cell:build_cell"
ENGINE_FACTORY = "everlong.cli.cell:build_engine_cell"
TRAINER_FACTORY = "everlong.cli.cell:build_trainer_cell"
RANK_FACTORY = "everlong.cli.cell:build_rank"


def build_cell(config_path: str) -> Cell:
    """The cell of the run whose resolved config lies at this path."""
    making = _Making.of(config_path)
    making.prepare(making.share)
    lease = asyncio.Lock()
    return Cell(making.engine(lease), making.trainer(lease))


def build_engine_cell(config_path: str) -> Cell:
    """Of a run that samples while it trains; it computes on half of the machine."""
    making = _Making.of(config_path)
    making.prepare(making.share)
    return Cell(making.engine(asyncio.Lock()), None)


def build_trainer_cell(config_path: str) -> Cell:
    """Of a run that samples while it trains; it computes on the other half."""
    making = _Making.of(config_path)
    making.prepare(making.share)
    return Cell(None, making.trainer(asyncio.Lock()))


def build_rank(config_path: str, ranks: Ranks) -> PolicyTrainer:
    """The trainer of a rank beside the cell's own, with the threads that this has while it trains."""
    making = _Making.of(config_path)
    making.prepare(making.share_of_rank)
    return making.policy_trainer(asyncio.Lock(), ranks)


@dataclass(frozen=True, slots=True)
class _Making:
    """What a cell is made of."""

    config: RunConfig
    source: ModelSource
    store: ObjectStore
    folder: RunFolder

    @classmethod
    def of(cls, config_path: str) -> _Making:
        folder = RunFolder(Path(config_path).parent)
        config = folder.open()
        return cls(config, find_model(config.model), open_store(folder.store_url(config)), folder)

    def prepare(self, share: int) -> None:
        """Set the process's threads, the config's or the machine's by `share`. Raises ValueError where it cannot keep what
        `numerics` asks for."""
        if isinstance(self.config.model, ScriptedModel):
            return
        import torch

        from everlong.models.numerics import Numerics, self_test

        if self.config.threads is not None or share > 1:
            torch.set_num_threads(self.config.threads or max(1, torch.get_num_threads() // share))
        shape, adapter = self.source.shape, self.config.adapter
        if Numerics(self.config.numerics) is Numerics.ALIGNED:
            self_test(
                shape.hidden_size,
                shape.intermediate_size,
                shape.padded_vocab_size,
                shape.head_dim,
                shape.num_heads,
                shape.num_kv_heads,
                adapter.rank if isinstance(adapter, LoraConfig) else None,
                shape.num_experts if isinstance(shape, MoeConfig) else None,
            )

    def engine(self, lease: asyncio.Lock) -> Engine:
        config = self.config
        if isinstance(config.model, ScriptedModel):
            return _scripted_engine(config, self.source, self.store)
        return _engine(config, self.source, self.store, self.folder, lease)

    @property
    def share_of_rank(self) -> int:
        """By how many the machine's threads are divided for each rank of the trainer."""
        return self.config.trainer.ranks * (2 if isinstance(self.config.schedule, AsyncConfig) else 1)

    @property
    def share(self) -> int:
        """And for a cell. Where its engine must give the trainer's bits it computes with a rank's threads too."""
        is_aligned = self.config.numerics == "aligned"
        return self.share_of_rank // (1 if is_aligned else self.config.trainer.ranks)

    def trainer(self, lease: asyncio.Lock) -> Trainer:
        config = self.config
        if isinstance(config.model, ScriptedModel):
            return _scripted_trainer(
                self.store, WeightPublisher(self.store, config.weights.anchor_every, config.weights.keep)
            )
        from everlong.trainer.ranks.leader import start_ranks
        from everlong.trainer.ranks.ranks import ALONE

        if config.trainer.ranks == 1:
            return self.policy_trainer(lease, ALONE)
        ranks = start_ranks(RANK_FACTORY, str(self.folder.config.absolute()), config.trainer.ranks)
        try:
            trainer = self.policy_trainer(lease, ranks)
            ranks.join()
        except BaseException:
            ranks.close()
            raise
        return trainer

    def policy_trainer(self, lease: asyncio.Lock, ranks: Ranks) -> PolicyTrainer:
        import torch

        from everlong.models.numerics import Numerics
        from everlong.trainer.trainer import PolicyTrainer

        config, threads = self.config, None
        if not ranks.rank and config.threads is None and self.share != self.share_of_rank:
            threads = max(1, torch.get_num_threads() // ranks.size)
        network = _network(config, self.source, make_renderer(config).tokenizer.vocab_size)
        refuse_other_model(config, self.source, network, self.store)
        return PolicyTrainer(
            _adapted(config, network),
            config=config.trainer,
            loss=config.loss,
            ratio=config.ratio,
            kl=config.kl,
            replay=config.replay,
            critic=config.critic if isinstance(config.credit, GaeConfig) else None,
            optimizer=config.optimizer,
            numerics=Numerics(config.numerics),
            store=self.store,
            publisher=WeightPublisher(self.store, config.weights.anchor_every, config.weights.keep),
            seed=config.seed,
            lease=lease,
            companions=checkpoint_companions(self.source),
            ranks=ranks,
            threads=threads,
        )


def _engine(
    config: RunConfig, source: ModelSource, store: ObjectStore, folder: RunFolder, lease: asyncio.Lock
) -> Engine:
    """The run's engine, or its pool of them; what they share of the machine they take turns on, by the lease."""

    def one(settings: EmbeddedConfig | VllmConfig, log: str) -> Engine:
        if isinstance(settings, VllmConfig):
            return _vllm_engine(config, settings, source, store, folder, log)
        return _torch_engine(config, settings, source, store, lease)

    if not isinstance(config.engine, PoolConfig):
        return one(config.engine, "vllm.log")
    from everlong.engines.pool.pool import EnginePool

    engine = config.engine
    members = [one(settings, f"{name}.log") for settings, name in zip(engine.members, engine.names, strict=True)]
    return EnginePool(members, engine)


def _torch_engine(
    config: RunConfig, settings: EmbeddedConfig, source: ModelSource, store: ObjectStore, lease: asyncio.Lock
) -> Engine:
    from everlong.engines.torch_engine.engine import TorchEngine

    tokenizer = make_renderer(config).tokenizer
    return TorchEngine(
        _build_model(config, source, tokenizer.vocab_size),
        WeightReader(store),
        token_bytes=tokenizer.token_bytes(),
        config=settings,
        lease=lease,
    )


def _vllm_engine(
    config: RunConfig, settings: VllmConfig, source: ModelSource, store: ObjectStore, folder: RunFolder, log: str
) -> Engine:
    """The server computes in processes of its own, beside the trainer, and shares no lease with it."""
    from everlong.engines.vllm_engine.engine import VllmEngine
    from everlong.engines.vllm_engine.server import GivenServer, ServedModel, Server, StartedServer

    assert not isinstance(config.model, ScriptedModel)
    tokenizer, context = make_renderer(config).tokenizer, settings.context(source.shape.max_positions)
    shape = replace(source.shape, vocab_size=tokenizer.vocab_size, padded_vocab_size=tokenizer.vocab_size)
    server: Server
    if settings.url is not None:
        server = GivenServer(settings.url, settings.start_timeout_s)
    else:
        model = ServedModel(shape.to_hf(), config.model.dtype, context)
        server = StartedServer(settings, model, log=folder.path / log, threads=config.threads)
    return VllmEngine(
        server,
        WeightReader(store),
        store_url=folder.absolute_store_url(config),
        token_bytes=tokenizer.token_bytes(),
        context=context,
        config=settings,
        pooled=isinstance(config.engine, PoolConfig),
    )


def _build_model(config: RunConfig, source: ModelSource, vocab_size: int) -> Llama:
    return _adapted(config, _network(config, source, vocab_size))


def _adapted(config: RunConfig, model: Llama) -> Llama:
    if isinstance(config.adapter, LoraConfig):
        model.adapt(config.adapter, _base_name(config.model))
    return model


def _base_name(model: ModelConfig) -> str | None:
    """What PEFT finds the frozen weights under; None where they lie nowhere."""
    match model:
        case Smollm2Model():
            return "HuggingFaceTB/SmolLM2-135M-Instruct"
        case FolderModel():
            return str(model.path.absolute())
        case HubModel():
            return model.repo
        case _:
            return None


def _network(config: RunConfig, source: ModelSource, vocab_size: int) -> Llama:
    import torch

    from everlong.models.checkpoint import load_checkpoint
    from everlong.models.numerics import Numerics
    from everlong.models.toy import random_llama

    assert not isinstance(config.model, ScriptedModel)
    dtype, numerics = getattr(torch, config.model.dtype), Numerics(config.numerics)
    if isinstance(config.model, ToyModel | ToyMoeModel):
        return random_llama(source.shape, config.model.seed, dtype, numerics)
    if source.build is not None:
        return source.build(source.shape, dtype, numerics)
    assert source.folder is not None
    return load_checkpoint(source.folder, vocab_size=vocab_size, dtype=dtype, numerics=numerics)


def _scripted_engine(config: RunConfig, source: ModelSource, store: ObjectStore) -> Engine:
    from everlong.engines.scripted import ScriptedEngine

    assert isinstance(config.model, ScriptedModel)
    renderer = make_renderer(config)
    return ScriptedEngine(
        _ScriptedPart(renderer, config.model.seed),
        WeightReader(store),
        token_bytes=renderer.tokenizer.token_bytes(),
        max_context=config.engine.context(source.shape.max_positions),
    )


def _scripted_trainer(store: ObjectStore, publisher: WeightPublisher) -> Trainer:
    from everlong.trainer.scripted import ScriptedTrainer

    return ScriptedTrainer(store, publisher)


class _ScriptedPart:
    """Writes the word that the task asks for in half of its episodes, looks around in the others, then says done."""

    def __init__(self, renderer: Renderer, seed: int) -> None:
        self._renderer, self._seed = renderer, seed

    def __call__(self, request: GenerateRequest) -> list[int]:
        tokenizer = self._renderer.tokenizer
        prompt = tokenizer.decode(request.prompt_ids.tolist())
        asked = re.search(r"Write the word (\S+) to (\S+?)\.\s", prompt + " ")
        if request.key.turn:
            text = "done"
        elif asked and (sum(request.key.episode.encode()) + self._seed) % 2:
            text = f"$ echo {asked[1]} > {asked[2]}"
        else:
            text = "$ ls"
        return [*tokenizer.encode(text), *self._renderer.stop_ids]
