"""Sampled tokens per second of the embedded engine on the toy: requests decoded together against one at a time."""

from __future__ import annotations

import asyncio

import numpy as np

from everlong.cli.bench import Row
from everlong.cli.benches.timing import interleaved
from everlong.contracts.records import GenerateRequest, SamplingKey, SamplingParams

PROMPT_TOKENS, NEW_TOKENS = 128, 64


def measure() -> list[Row]:
    rows = []
    for count, top_p in ((16, 1.0), (64, 1.0), (64, 0.95)):
        loop = asyncio.new_event_loop()
        engine = loop.run_until_complete(_engine())
        requests = _requests(count, top_p)

        async def together(engine=engine, requests=requests) -> None:
            await asyncio.gather(*(engine.generate(request) for request in requests))

        async def apart(engine=engine, requests=requests) -> None:
            for request in requests[:4]:
                await engine.generate(request)

        many, one = interleaved(
            lambda w=together, lo=loop: lo.run_until_complete(w()),
            lambda w=apart, lo=loop: lo.run_until_complete(w()),
            repeats=3,
        )
        ours, reference = count * NEW_TOKENS / many, 4 * NEW_TOKENS / one
        case = f"{count}, top_p {top_p:g}"
        rows.append(Row(case, "tokens_per_s", "1/s", ours, "one at a time", reference, ours / reference))
        loop.run_until_complete(engine.close())
        loop.close()
    return rows


async def _engine():
    from everlong.engines.config import EmbeddedConfig
    from everlong.engines.torch_engine.engine import TorchEngine
    from everlong.models.toy import build_toy
    from everlong.rollouts.renderers.tokenizers import ByteTokenizer
    from everlong.storage import open_store
    from everlong.trainer.trainer import weight_set
    from everlong.weights import WeightPublisher, WeightReader

    store = open_store("memory://")
    WeightPublisher(store, 10).publish(weight_set(build_toy(0), 0), None)
    engine = TorchEngine(
        build_toy(0),
        WeightReader(store),
        token_bytes=ByteTokenizer().token_bytes(),
        config=EmbeddedConfig(max_running=64, prefix_cache=False),
        lease=asyncio.Lock(),
    )
    await engine.update(0)
    return engine


def _requests(count: int, top_p: float) -> list[GenerateRequest]:
    rng = np.random.default_rng(0)
    return [
        GenerateRequest(
            request_id=str(number),
            key=SamplingKey(run_seed=0, episode=str(number), turn=0),
            prompt_ids=rng.integers(0, 256, PROMPT_TOKENS, np.int32),
            params=SamplingParams(max_tokens=NEW_TOKENS, top_p=top_p),
        )
        for number in range(count)
    ]
