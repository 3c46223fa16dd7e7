"""The promises of an engine, kept by the scripted one and by the embedded one."""

import asyncio

import numpy as np
import pytest
from tests.engine_contract import *  # noqa: F403
from tests.engine_contract import CONTEXT, SHAPE, TOKEN_BYTES, VOCAB, published

from everlong.engines.config import EmbeddedConfig
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


@pytest.fixture(params=["scripted", "torch"])
async def engine(request, store, cache_unit):
    reader = WeightReader(store)
    if request.param == "scripted":
        engine = ScriptedEngine(endless, reader, token_bytes=TOKEN_BYTES, max_context=CONTEXT)
    else:
        config = EmbeddedConfig(block_tokens=cache_unit, cache_tokens=2 * CONTEXT, prefill_chunk_tokens=8)
        engine = TorchEngine(Llama(SHAPE), reader, token_bytes=TOKEN_BYTES, config=config, lease=asyncio.Lock())
    yield engine
    await engine.close()


def endless(request):
    """More ids than any context holds, another sequence for every key."""
    seed = [request.key.run_seed, request.key.turn, *request.key.episode.encode()]
    return np.random.default_rng(seed).integers(0, VOCAB, 2 * CONTEXT)
