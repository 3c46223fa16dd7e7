"""The embedded engine with the toy model: bits at its real sizes, and a crowd on a cache that is too small."""

import asyncio
import random

import numpy as np
import pytest
import torch

from everlong.contracts.records import FinishReason, GenerateRequest, SamplingKey, SamplingParams
from everlong.engines.config import EmbeddedConfig
from everlong.engines.torch_engine.engine import TorchEngine
from everlong.models.attention import TreeAttention
from everlong.models.head import token_logprobs
from everlong.models.numerics import Numerics
from everlong.models.toy import build_toy, toy_config
from everlong.storage import open_store
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet

SHAPE = toy_config()


@pytest.fixture(scope="module")
def reader():
    store = open_store("memory://")
    for version in (0, 1):
        # larger than at the start of training, so that the distribution is not flat
        weights = {name: weight.detach() * 4 for name, weight in build_toy(version).named_weights().items()}
        raw = {n: RawTensor("float32", tuple(w.shape), w.view(torch.uint32).numpy()) for n, w in weights.items()}
        WeightPublisher(store, anchor_every=1).publish(WeightSet(version, raw), None)
    return WeightReader(store)


def engine_of(reader, **settings):
    return TorchEngine(
        build_toy(0, numerics=Numerics.ALIGNED),
        reader,
        token_bytes=[bytes([i % 256]) for i in range(SHAPE.vocab_size)],
        config=EmbeddedConfig(**settings),
        lease=asyncio.Lock(),
    )


def ask(number, num_prompt, max_tokens, **params):
    prompt = np.random.default_rng(number % 3).integers(0, 256, num_prompt).astype(np.int32)  # prefixes recur
    return GenerateRequest(
        request_id=str(number),
        key=SamplingKey(run_seed=1, episode="e", turn=number),
        prompt_ids=prompt,
        params=SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.7, "top_p": 0.9, **params}),
    )


async def test_sixteen_together_have_the_trainers_bits(reader):
    engine = engine_of(reader)
    await engine.update(0)
    requests = [ask(i, 100 + 3 * i, 12) for i in range(16)]
    replies = await asyncio.gather(*[engine.generate(request) for request in requests])
    await engine.close()
    model = build_toy(0, numerics=Numerics.ALIGNED)
    model.load_weights({name: weight.detach() * 4 for name, weight in build_toy(0).named_weights().items()})
    for request, reply in zip(requests, replies, strict=True):
        columns = reply.columns
        ids = torch.from_numpy(np.concatenate([request.prompt_ids, columns.ids])).long()
        attend = TreeAttention([(-1, 0, len(ids))], SHAPE.head_dim**-0.5, Numerics.ALIGNED)
        hidden = model(ids, torch.arange(len(ids)), attend)[len(request.prompt_ids) - 1 : -1]
        kept = torch.from_numpy(columns.kept.ids), torch.from_numpy(columns.kept.offsets)
        labels, temperatures = ids[len(request.prompt_ids) :], torch.from_numpy(columns.temperatures)
        scored, _ = token_logprobs(
            hidden, model.head_weight, SHAPE, labels, temperatures, kept, Numerics.ALIGNED, chunk_tokens=5
        )
        assert columns.logprobs.tobytes() == scored.detach().numpy().tobytes()


async def crowd(reader, seed):
    """Random arrivals, aborts, cancellations and updates on a cache for two requests; the requests and their replies."""
    chance = random.Random(seed)
    engine = engine_of(reader, cache_tokens=96, max_context=64, block_tokens=4, max_running=6, prefill_chunk_tokens=24)
    await engine.update(0)
    requests = [ask(i, chance.randint(1, 20), chance.randint(10, 40)) for i in range(30)]
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(engine.generate(request)))
        await asyncio.sleep(chance.choice([0, 0, 0.01]))
        match chance.randrange(8):
            case 0:
                await engine.abort((chance.choice(requests).request_id,))
            case 1:
                chance.choice(tasks).cancel()
            case 2:
                await engine.update(chance.randrange(2))
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    status = await engine.status()
    await engine.close()
    return requests, replies, status


@pytest.mark.parametrize("seed", range(2))
async def test_a_crowd_leaks_nothing_and_every_whole_answer_is_the_one_it_gets_undisturbed(reader, seed):
    requests, replies, status = await crowd(reader, seed)
    assert (status.num_running, status.num_waiting, status.metrics["cache_used"]) == (0, 0, 0)
    assert status.metrics["preemptions"] > 0
    whole = [
        (request, reply)
        for request, reply in zip(requests, replies, strict=True)
        if not isinstance(reply, BaseException) and reply.finish_reason is not FinishReason.ABORT
    ]
    num_checked = 0
    for version in (0, 1):
        pure = [(request, reply) for request, reply in whole if set(reply.columns.versions.tolist()) == {version}]
        quiet = engine_of(reader, max_context=64)
        await quiet.update(version)
        undisturbed = await asyncio.gather(*[quiet.generate(request) for request, _ in pure])
        await quiet.close()
        assert [reply.columns for _, reply in pure] == [reply.columns for reply in undisturbed]
        num_checked += len(pure)
    assert num_checked >= 5
