"""SmolLM2-135M in bfloat16, its tokenizer, engine and trainer as a worker cell holds them, for the benches."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from everlong.contracts.ports import ObjectStore
from everlong.engines.config import EmbeddedConfig
from everlong.models.adapter_config import LoraConfig
from everlong.models.smollm2 import smollm2_folder
from everlong.rollouts.renderers.tokenizers import FileTokenizer
from everlong.storage import open_store
from everlong.trainer.config import AdamWConfig, GrpoConfig, RatioConfig, TrainerConfig
from everlong.weights import WeightPublisher, WeightReader

if TYPE_CHECKING:
    from everlong.engines.torch_engine.engine import TorchEngine
    from everlong.trainer.trainer import PolicyTrainer


@dataclass(frozen=True, slots=True)
class SmolCell:
    folder: Path
    store: ObjectStore
    tokenizer: FileTokenizer
    engine: TorchEngine
    """At version 0."""
    trainer: PolicyTrainer
    threads: int

    async def close(self) -> None:
        await self.engine.close()
        await self.trainer.close()


async def open_smollm2(
    engine: EmbeddedConfig,
    adapter: LoraConfig | None = None,
    learning_rate: float = 1e-6,
    lease: asyncio.Lock | None = None,
) -> SmolCell:
    """Every weight trains, or the adapters. `lease` replaces one of its own. Raises FileNotFoundError where the weights are not
    installed."""
    import torch

    from everlong.engines.torch_engine.engine import TorchEngine
    from everlong.models.checkpoint import load_checkpoint
    from everlong.models.numerics import Numerics
    from everlong.trainer.trainer import PolicyTrainer

    folder, store, lease = smollm2_folder(), open_store("memory://"), lease or asyncio.Lock()
    tokenizer = FileTokenizer(folder / "tokenizer.json")
    policy, sampled = (load_checkpoint(folder, vocab_size=tokenizer.vocab_size, dtype=torch.bfloat16) for _ in range(2))
    if adapter is not None:
        policy.adapt(adapter)
        sampled.adapt(adapter)
    trainer = PolicyTrainer(
        policy, config=TrainerConfig(), loss=GrpoConfig(), ratio=RatioConfig(),
        optimizer=AdamWConfig(learning_rate=learning_rate), numerics=Numerics.FAST, store=store,
        publisher=WeightPublisher(store, 10), seed=0, lease=lease,
    )  # fmt: skip
    embedded = TorchEngine(
        sampled, WeightReader(store), token_bytes=tokenizer.token_bytes(), config=engine, lease=lease
    )
    await trainer.publish()
    await embedded.update(0)
    return SmolCell(folder, store, tokenizer, embedded, trainer, torch.get_num_threads())
