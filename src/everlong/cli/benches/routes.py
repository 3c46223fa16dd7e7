"""What replaying routes does to the mismatch of engine and trainer, and what it costs, on the toy with experts.

Both sides hold the same weights, four times as large as at the start of training so that no distribution is flat. In fast
numerics, whose sums come out otherwise in the last bits, `mismatch` is the mean |log(p/q)| of sampled tokens, by the present
routers (`own`) and by the record. `alike` is the share of recorded choices that the trainer's routers make too. `step` is
forward and backward over the same tokens, and its reference the same without replay. All but the step's figures repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from everlong.cli.bench import Row
from everlong.cli.benches.timing import interleaved
from everlong.contracts.records import GenerateRequest, MicroBatch, SamplingKey, SamplingParams, Segment
from everlong.contracts.tokens import TokenColumns
from everlong.models.config import Dtype, ToyMoeModel
from everlong.models.moe.config import Router
from everlong.trainer.config import ReplayConfig

if TYPE_CHECKING:
    from torch import Tensor

    from everlong.models.decisions import TokenDecide
    from everlong.models.llama.model import Llama

ANSWERS, PROMPT, ANSWER = 12, 64, 64
NONE, RECOMPUTED, RECORDED = (
    ReplayConfig(),
    ReplayConfig(routes="rollout"),
    ReplayConfig(routes="rollout", weights="recorded"),
)


def measure() -> list[Row]:
    rows = []
    cases: tuple[tuple[Router, Dtype], ...] = (("softmax", "float32"), ("softmax", "bfloat16"), ("sigmoid", "bfloat16"))
    for router, dtype in cases:
        sides = asyncio.run(_Sides.sampled(ToyMoeModel(router=router, dtype=dtype)))
        rows += _rows(f"{router} {dtype}", sides)
    return rows


def _rows(case: str, sides: _Sides) -> list[Row]:
    own, rows = sides.mismatch(NONE), []
    for name, replay in (("recomputed", RECOMPUTED), ("recorded", RECORDED)):
        bound = sides.mismatch(replay)
        rows.append(Row(f"{case}, {name}", "mismatch", "nats", bound, "own", own, own / bound))
        tokens = sum(len(micro_batch.columns) for micro_batch in sides.micro_batches)
        size = sides.size_bytes(replay) / tokens
        rows.append(Row(f"{case}, {name}", "bytes per token", "bytes", size, "an id", 4.0, 4.0 / size))
    rows.append(Row(case, "alike", "share", sides.alike(), "all", 1.0, sides.alike()))
    ours, reference = interleaved(sides.step(RECOMPUTED), sides.step(NONE))
    rows.append(Row(case, "step", "s", ours, "own", reference, reference / ours))
    return rows


@dataclass(frozen=True, slots=True)
class _Sides:
    """A trainer's model, and what an engine sampled with the same weights."""

    model: Llama
    micro_batches: tuple[MicroBatch, ...]

    @classmethod
    async def sampled(cls, config: ToyMoeModel) -> _Sides:
        import torch

        from everlong.engines.config import EmbeddedConfig
        from everlong.engines.torch_engine.engine import TorchEngine
        from everlong.models.networks import empty_network
        from everlong.models.source import toy_moe_config
        from everlong.models.toy import random_llama
        from everlong.storage import open_store
        from everlong.trainer.trainer import weight_set
        from everlong.weights import WeightPublisher, WeightReader

        shape, dtype = toy_moe_config(config), getattr(torch, config.dtype)
        model = random_llama(shape, config.seed, dtype)
        with torch.no_grad():
            for name, weight in model.named_weights().items():
                if "norm" not in name:
                    weight.mul_(4)
        store = open_store("memory://")
        WeightPublisher(store, anchor_every=1).publish(weight_set(model, 0), None)
        token_bytes = [bytes([i % 256]) for i in range(shape.vocab_size)]
        engine = TorchEngine(
            empty_network(shape, dtype),
            WeightReader(store),
            token_bytes=token_bytes,
            config=EmbeddedConfig(),
            lease=asyncio.Lock(),
        )
        await engine.update(0)
        requests = [_request(number, tuple(shape.decisions)) for number in range(ANSWERS)]
        replies = await asyncio.gather(*[engine.generate(request) for request in requests])
        await engine.close()
        pairs = zip(requests, replies, strict=True)
        packed = (TokenColumns.context(request.prompt_ids, reply.context) + reply.columns for request, reply in pairs)
        return cls(model, tuple(_row_of(columns) for columns in packed))

    def mismatch(self, replay: ReplayConfig) -> float:
        from everlong.models.decisions import Replay
        from everlong.trainer.scoring import score_micro_batch

        differences = []
        for micro_batch in self.micro_batches:
            columns = micro_batch.columns
            scored = score_micro_batch(self.model, micro_batch, 128, Replay(self._rows(micro_batch, replay)))
            differences.append(np.abs(scored - columns.logprobs)[columns.sampled])
        return float(np.concatenate(differences).mean())

    def alike(self) -> float:
        import torch

        from everlong.models.decisions import Replay

        shares = []
        for micro_batch in self.micro_batches:
            asked = Replay(self._rows(micro_batch, RECOMPUTED))
            with torch.no_grad():
                self._states(micro_batch, asked)
            shares.append(asked.shares()["overlap"].double())
        return float(torch.cat(shares).mean())

    def size_bytes(self, replay: ReplayConfig) -> int:
        names = replay.recorded(self.model.config.decisions)
        return sum(micro_batch.columns.decisions.only(names).size_bytes for micro_batch in self.micro_batches)

    def step(self, replay: ReplayConfig) -> Callable[[], None]:
        from everlong.models.decisions import Replay

        def step() -> None:
            for micro_batch in self.micro_batches:
                rows = self._rows(micro_batch, replay)
                self._states(micro_batch, Replay(rows) if rows else None).sum().backward()

        return step

    def _states(self, micro_batch: MicroBatch, decide: TokenDecide | None) -> Tensor:
        """[T, M], of all tokens."""
        from everlong.models.tree_pass import read_states

        tokens, weights = np.arange(len(micro_batch.columns)), list(self.model.trained_weights().values())
        return read_states(self.model, weights, micro_batch, tokens, lambda hidden_NM, _: (hidden_NM,), decide)[0]

    def _rows(self, micro_batch: MicroBatch, replay: ReplayConfig):
        from everlong.trainer.decided import replayed_rows

        shape = self.model.config
        return replayed_rows(0, micro_batch, shape, replay.recorded(shape.decisions))


def _request(number: int, record: tuple[str, ...]) -> GenerateRequest:
    return GenerateRequest(
        request_id=str(number),
        key=SamplingKey(run_seed=0, episode="bench", turn=number),
        prompt_ids=np.random.default_rng(number).integers(0, 256, PROMPT).astype(np.int32),
        params=SamplingParams(max_tokens=ANSWER, record=record),
    )


def _row_of(columns: TokenColumns) -> MicroBatch:
    return MicroBatch(
        columns=columns.with_credit(1.0), segments=(Segment(parent=-1, start=0, length=len(columns), episode=0),)
    )
