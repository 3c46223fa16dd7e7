"""The real vLLM server, killed while it samples. Two starts of it, so a minute and more."""

import os
import signal

import pytest
from tests.engine_contract import CONTEXT, SHAPE, TOKEN_BYTES, VOCAB, ask, published
from tests.kept_server import needs_vllm, processes_of

from everlong.engines.config import VllmConfig
from everlong.engines.vllm_engine.engine import VllmEngine
from everlong.engines.vllm_engine.protocol import Transcript
from everlong.engines.vllm_engine.server import ServedModel, StartedServer
from everlong.storage import open_store
from everlong.weights import WeightReader

pytestmark = needs_vllm
SERVER = "vllm.entrypoints.openai.api_server"
NUM_TOKENS = 800
NEVER = "z"
"""A stop string that no token can spell: with one, the server sends token by token."""


@pytest.fixture
async def engine(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERLONG_TEST", str(tmp_path))  # by which its processes are found
    url = str(tmp_path / "store")
    published(url)
    settings = VllmConfig(max_running=4, cache_mb=64, max_restarts=1)
    model = ServedModel({**SHAPE.to_hf(), "vocab_size": VOCAB}, "float32", CONTEXT)
    server = StartedServer(settings, model, log=tmp_path / "vllm.log", threads=1)
    reader = WeightReader(open_store(url))
    engine = VllmEngine(server, reader, store_url=url, token_bytes=TOKEN_BYTES, context=CONTEXT, config=settings)
    yield engine
    await engine.close()


async def test_a_request_whose_server_is_killed_is_answered_by_the_next_and_nothing_is_left_behind(
    engine, tmp_path, monkeypatch
):
    await engine.update(3)
    await engine.update(4)
    request = ask(max_tokens=NUM_TOKENS, stop_strings=(NEVER,))
    expected = await engine.generate(request)
    doomed = processes_of(SERVER, tmp_path)
    assert len(doomed) == 1
    take = Transcript.feed

    def feed(transcript, chunk):
        """The server dies over the first chunk."""
        while doomed:
            os.kill(doomed.pop(), signal.SIGKILL)
        return take(transcript, chunk)

    monkeypatch.setattr(Transcript, "feed", feed)
    reply = await engine.generate(request)
    assert reply.columns.ids.tolist() == expected.columns.ids.tolist()
    assert reply.columns.versions.tolist() == [4] * NUM_TOKENS
    assert (await engine.status()).metrics["server_losses"] == 1.0
    await engine.close()
    assert everybody_of(tmp_path) == []


def everybody_of(folder):
    """Also the server's engine and workers, which are started under other names."""
    mine = os.getpid()
    found = []
    for entry in os.listdir("/proc"):
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if entry.isdigit() and int(entry) != mine and f"EVERLONG_TEST={folder}".encode() in file.read():
                    found.append(int(entry))
        except OSError:
            continue
    return found
