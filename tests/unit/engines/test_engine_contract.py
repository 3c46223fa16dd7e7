"""The promises of an engine, kept by the scripted one, by the embedded one, and by a pool of two of either."""

import asyncio

import numpy as np
import pytest
from tests.engine_contract import *  # noqa: F403
from tests.engine_contract import CONTEXT, SHAPE, TOKEN_BYTES, VOCAB, published

from everlong.engines.config import EmbeddedConfig, PoolConfig
from everlong.engines.pool.pool import EnginePool
from everlong.engines.scripted import CACHE_BLOCK_TOKENS, ScriptedEngine
from everlong.engines.torch_engine.engine import TorchEngine
from everlong.models.llama.model import Llama
from everlong.weights import WeightReader


@pytest.fixture(scope="module")
def store():
    return published("memory://")


@pytest.fixture
def cache_unit():
    return CACHE_BLOCK_TOKENS


@pytest.fixture(params=["scripted", "torch", "pool of scripted", "pool of torch"])
async def engine(request, store, cache_unit):
    config = EmbeddedConfig(block_tokens=cache_unit, cache_tokens=2 * CONTEXT, prefill_chunk_tokens=8)
    lease = asyncio.Lock()

    def one():
        if request.param.endswith("scripted"):
            return ScriptedEngine(endless, WeightReader(store), token_bytes=TOKEN_BYTES, max_context=CONTEXT)
        return TorchEngine(Llama(SHAPE), WeightReader(store), token_bytes=TOKEN_BYTES, config=config, lease=lease)

    pooled = request.param.startswith("pool")
    engine = EnginePool([one(), one()], PoolConfig(members=(config, config))) if pooled else one()
    yield engine
    await engine.close()


def endless(request):
    """More ids than any context holds, another sequence for every key."""
    seed = [request.key.run_seed, request.key.turn, *request.key.episode.encode()]
    return np.random.default_rng(seed).integers(0, VOCAB, 2 * CONTEXT)
