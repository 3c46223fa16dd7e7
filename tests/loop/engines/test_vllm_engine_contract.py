"""The promises of an engine, kept by the engine in front of a vLLM server; the server is a fake, in a process of its own."""

import pytest
import pytest_asyncio
from tests.engine_contract import *  # noqa: F403
from tests.engine_contract import CONTEXT, SHAPE, TOKEN_BYTES, VOCAB, published
from tests.fake_vllm import write_python
from tests.kept_server import Kept

from everlong.engines.config import VllmConfig
from everlong.engines.vllm_engine.engine import VllmEngine
from everlong.engines.vllm_engine.server import ServedModel, StartedServer
from everlong.storage import open_store
from everlong.weights import WeightReader

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def store_url(tmp_path_factory):
    url = str(tmp_path_factory.mktemp("store"))
    published(url)
    return url


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return VllmConfig(python=write_python(tmp_path_factory.mktemp("fake")), max_running=16)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(settings, tmp_path_factory):
    hf_config = {**SHAPE.to_hf(), "vocab_size": VOCAB}
    model = ServedModel(hf_config, "float32", CONTEXT)
    server = StartedServer(settings, model, log=tmp_path_factory.mktemp("log") / "vllm.log", threads=1)
    yield Kept(server)
    await server.stop()


@pytest.fixture
def cache_unit():
    return 4


@pytest_asyncio.fixture(loop_scope="module")
async def engine(server, settings, store_url):
    engine = VllmEngine(
        server,
        WeightReader(open_store(store_url)),
        store_url=store_url,
        token_bytes=TOKEN_BYTES,
        context=CONTEXT,
        config=settings,
    )
    yield engine
    await engine.close()
