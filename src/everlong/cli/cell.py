"""What stands behind the ports in the worker: `build_cell` is the factory path that the control process names."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from everlong.cli.config import RunConfig
from everlong.cli.rendering import checkpoint_companions, make_renderer
from everlong.cli.run_folder import RunFolder
from everlong.contracts.ports import Engine, ObjectStore
from everlong.contracts.records import GenerateRequest
from everlong.engines.config import EmbeddedConfig, PoolConfig, VllmConfig
from everlong.models.config import ScriptedModel, ToyModel
from everlong.models.source import ModelSource, find_model
from everlong.orchestrator.cells.worker import Cell
from everlong.rollouts.renderers.chatml import Renderer
from everlong.storage import open_store
from everlong.weights import WeightPublisher, WeightReader

if TYPE_CHECKING:
    from everlong.models.llama.model import Llama

FACTORY = "everlong.cli.cell:build_cell"


def build_cell(config_path: str) -> Cell:
    """The cell of the run whose resolved config lies at this path."""
    folder = RunFolder(Path(config_path).parent)
    config = folder.read_config()
    store = open_store(folder.store_url(config))
    source = find_model(config.model)
    build = _scripted_cell if isinstance(config.model, ScriptedModel) else _torch_cell
    return build(config, source, store, folder)


def _torch_cell(config: RunConfig, source: ModelSource, store: ObjectStore, folder: RunFolder) -> Cell:
    import torch

    from everlong.models.numerics import Numerics, self_test
    from everlong.trainer.trainer import PolicyTrainer

    if config.threads is not None:
        torch.set_num_threads(config.threads)
    numerics, shape = Numerics(config.numerics), source.shape
    if numerics is Numerics.ALIGNED:
        self_test(
            shape.hidden_size,
            shape.intermediate_size,
            shape.padded_vocab_size,
            shape.head_dim,
            shape.num_heads,
            shape.num_kv_heads,
        )
    tokenizer = make_renderer(config).tokenizer
    lease = asyncio.Lock()
    engine = _engine(config, source, store, folder, lease)
    trainer = PolicyTrainer(
        _build_model(config, source, tokenizer.vocab_size),
        config=config.trainer,
        loss=config.loss,
        ratio=config.ratio,
        kl=config.kl,
        optimizer=config.optimizer,
        numerics=numerics,
        store=store,
        publisher=WeightPublisher(store, config.weights.anchor_every),
        seed=config.seed,
        lease=lease,
        companions=checkpoint_companions(source),
    )
    return Cell(engine, trainer)


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
    )


def _build_model(config: RunConfig, source: ModelSource, vocab_size: int) -> Llama:
    import torch

    from everlong.models.checkpoint import load_checkpoint
    from everlong.models.numerics import Numerics
    from everlong.models.toy import build_toy

    assert not isinstance(config.model, ScriptedModel)
    dtype, numerics = getattr(torch, config.model.dtype), Numerics(config.numerics)
    if isinstance(config.model, ToyModel):
        return build_toy(config.model.seed, dtype, numerics)
    if source.build is not None:
        return source.build(source.shape, dtype, numerics)
    assert source.folder is not None
    return load_checkpoint(source.folder, vocab_size=vocab_size, dtype=dtype, numerics=numerics)


def _scripted_cell(config: RunConfig, source: ModelSource, store: ObjectStore, folder: RunFolder) -> Cell:
    from everlong.engines.scripted import ScriptedEngine
    from everlong.trainer.scripted import ScriptedTrainer

    assert isinstance(config.model, ScriptedModel)
    renderer = make_renderer(config)
    engine = ScriptedEngine(
        _ScriptedPart(renderer, config.model.seed),
        WeightReader(store),
        token_bytes=renderer.tokenizer.token_bytes(),
        max_context=config.engine.context(source.shape.max_positions),
    )
    return Cell(engine, ScriptedTrainer(store, WeightPublisher(store, config.weights.anchor_every)))


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
