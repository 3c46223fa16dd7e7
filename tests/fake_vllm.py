"""A server that speaks the endpoints of vLLM 0.32 that the engine uses, in front of our own engine on a tiny llama.

Started as vLLM is (`write_python` makes the program to name as engine.python): it takes vLLM's arguments, builds the model
of config.json without weights and pulls versions out of the run's store. It refuses calls in an order that vLLM would
refuse. Where FAKE_VLLM_FAULTS names a folder, a file in it is taken away and done: "die" ends the process in the middle of
the next answer, "refuse" fails the next weight update, "unready" ends it before it listens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import stat
import sys
from pathlib import Path

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from everlong import __version__
from everlong.contracts.errors import EngineError
from everlong.contracts.records import FinishReason, GenerateReply, GenerateRequest, SamplingKey, SamplingParams
from everlong.contracts.tokens import NO_VERSION
from everlong.engines.config import EmbeddedConfig
from everlong.engines.torch_engine.engine import TorchEngine
from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.storage import open_store
from everlong.weights import RawTensor, WeightReader, WeightSet

MASKED = -9999.0


def write_python(folder: Path) -> Path:
    """A program that takes the place of the Python of vLLM's environment. Its processes name it in theirs."""
    path = folder / "python"
    places = ":".join(entry for entry in sys.path if entry)
    path.write_text(
        f"#!/bin/sh\nFAKE_VLLM='{path}' PYTHONPATH='{places}' exec '{sys.executable}' -m tests.fake_vllm \"$@\"\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class UnpaddedReader(WeightReader):
    """Leaves out rows that pad the vocabulary, as vLLM's plugin does."""

    def __init__(self, url: str, vocab_size: int) -> None:
        super().__init__(open_store(url))
        self._vocab_size = vocab_size

    def read(self, version: int, have: WeightSet | None = None) -> WeightSet:
        whole = super().read(version)
        tensors = {name: self._cut(name, raw) for name, raw in whole.tensors.items()}
        return WeightSet(version, tensors)

    def _cut(self, name: str, raw: RawTensor) -> RawTensor:
        if not name.endswith(("embed_tokens.weight", "lm_head.weight")):
            return raw
        bits = raw.bits[: self._vocab_size]
        return RawTensor(raw.dtype, bits.shape, bits)


class FakeVllm:
    def __init__(self, arguments: argparse.Namespace) -> None:
        import torch

        shape = LlamaConfig.from_hf(json.loads((arguments.model / "config.json").read_text()))
        self.model = Llama(shape, dtype=getattr(torch, arguments.dtype))
        self.vocab_size, self.context = shape.vocab_size, arguments.max_model_len
        self.settings = EmbeddedConfig(
            block_tokens=4, cache_tokens=2 * arguments.max_model_len, max_running=arguments.max_num_seqs
        )
        self.engine: TorchEngine | None = None
        self.reader: UnpaddedReader | None = None
        self.paused = self.updating = False
        self.resumed = asyncio.Event()
        self.label = "default"

    async def init(self, request: Request) -> Response:
        url = (await request.json())["init_info"]["store"]
        self.reader = UnpaddedReader(url, self.vocab_size)
        self.engine = TorchEngine(
            self.model, self.reader, token_bytes=[b"?"] * self.vocab_size, config=self.settings, lease=asyncio.Lock()
        )
        return JSONResponse({"message": "Weight transfer initialized"})

    async def pause(self, request: Request) -> Response:
        assert request.query_params["mode"] == "keep"
        self.paused = True
        self.resumed.clear()
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.paused = False
        self.resumed.set()
        return JSONResponse({"status": "resumed"})

    async def start_update(self, request: Request) -> Response:
        if self.updating or not self.paused:
            return failed(f"start_weight_update while updating={self.updating}, paused={self.paused}")
        self.updating = True
        return JSONResponse({"message": "Weight update started"})

    async def update(self, request: Request) -> Response:
        if self.engine is None or not self.updating:
            return failed("start_weight_update must be called before update_weights.")
        if fault("refuse"):
            self.updating = False
            return failed("told to refuse this update")
        try:
            await self.engine.update((await request.json())["update_info"]["version"])
        except EngineError as error:
            self.updating = False
            return failed(str(error))
        return JSONResponse({"message": "Weights updated"})

    async def finish_update(self, request: Request) -> Response:
        if not self.updating:
            return failed("finish_weight_update called without a matching start_weight_update.")
        self.updating, self.label = False, (await request.json())["weight_version"]
        return JSONResponse({"message": "Weight update finished"})

    async def rpc(self, request: Request) -> Response:
        assert (await request.json())["method"] == "everlong_report"
        version = NO_VERSION if self.engine is None else (await self.engine.status()).policy_version
        held = None
        if version != NO_VERSION:
            assert self.reader is not None
            held = self.reader.manifest(version).fingerprint
        report = {"everlong": __version__, "version": None if held is None else version, "fingerprint": held}
        return JSONResponse({"results": [report]})

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        params = body["sampling_params"]
        assert body["stream"] and params["ignore_eos"] and not params["detokenize"]
        if self.paused:
            await self.resumed.wait()
        assert self.engine is not None
        asked = GenerateRequest(
            request_id="generate-tokens-" + body["request_id"],
            key=SamplingKey(run_seed=params["seed"], episode="", turn=0),
            prompt_ids=np.array(body["token_ids"], np.int32),
            params=SamplingParams(
                temperature=params["temperature"],
                top_p=params["top_p"],
                top_k=params["top_k"],
                max_tokens=params["max_tokens"],
                stop_ids=tuple(params["stop_token_ids"]),
            ),
        )
        return StreamingResponse(self.events(asked, params["logprobs"]), media_type="text/event-stream")

    async def events(self, asked: GenerateRequest, num_candidates: int):
        assert self.engine is not None
        dying = fault("die")
        reply = await self.engine.generate(asked)
        half = len(reply.columns) // 2
        yield event({"choices": [choice(reply, 0, half, num_candidates, self.vocab_size)]})
        if dying:
            os._exit(9)
        last = choice(reply, half, len(reply.columns), num_candidates, self.vocab_size)
        yield event({"choices": [{**last, **ending(reply)}]})
        details = {"cached_tokens": reply.num_cached_tokens}
        usage = {"completion_tokens": len(reply.columns), "prompt_tokens_details": details}
        yield event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    async def abort(self, request: Request) -> Response:
        if self.engine is not None:
            await self.engine.abort(tuple((await request.json())["request_ids"]))
        return Response()

    async def metrics(self, request: Request) -> Response:
        waiting = 0 if self.engine is None else (await self.engine.status()).num_waiting
        return PlainTextResponse(f'# HELP x\nvllm:num_requests_waiting{{engine="0",model_name="m"}} {waiting}.0\n')

    def app(self) -> Starlette:
        posts = {
            "/init_weight_transfer_engine": self.init,
            "/pause": self.pause,
            "/resume": self.resume,
            "/start_weight_update": self.start_update,
            "/update_weights": self.update,
            "/finish_weight_update": self.finish_update,
            "/collective_rpc": self.rpc,
            "/inference/v1/generate": self.generate,
            "/inference/v1/abort_requests": self.abort,
        }
        room = {"data": [{"max_model_len": self.context}]}
        gets = {
            "/health": lambda request: Response(),
            "/version": lambda request: JSONResponse({"version": "0.32.0"}),
            "/v1/models": lambda request: JSONResponse(room),
            "/metrics": self.metrics,
        }
        routes = [Route(path, call, methods=["POST"]) for path, call in posts.items()]
        return Starlette(routes=routes + [Route(path, call) for path, call in gets.items()])


def event(payload: dict) -> str:
    return f"data: {json.dumps(payload)}\n\n"


def failed(message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": 500}}, 500)


def fault(name: str) -> bool:
    folder = os.environ.get("FAKE_VLLM_FAULTS")
    try:
        os.unlink(Path(folder or "/nonexistent") / name)
    except OSError:
        return False
    return True


def choice(reply: GenerateReply, start: int, stop: int, num_candidates: int, vocab_size: int) -> dict:
    content = []
    for token in range(start, stop):
        sampled, logprob = int(reply.columns.ids[token]), float(reply.columns.logprobs[token])
        kept = [i for i in reply.columns.kept.row(token).tolist() if i != sampled]
        rest = [i for i in range(vocab_size) if i != sampled and i not in kept]
        # only which tokens are left matters to the engine, not how likely the others are
        top = [(sampled, logprob), *((i, -1.0) for i in kept), *((i, MASKED) for i in rest)][:num_candidates]
        content.append(
            {
                "token_id": sampled,
                "logprob": logprob,
                "top_logprobs": [{"token_id": i, "logprob": p} for i, p in top],
            }
        )
    ids = reply.columns.ids[start:stop].tolist()
    return {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": None}


def ending(reply: GenerateReply) -> dict:
    spans: list[dict] = []
    for index, version in enumerate(reply.columns.versions.tolist()):
        if not spans or spans[-1]["version"] != str(version):
            spans.append({"version": str(version), "start": index, "end": index})
        spans[-1]["end"] = index + 1
    stop = reply.stop_match if reply.finish_reason is FinishReason.STOP else None
    return {"finish_reason": str(reply.finish_reason), "stop_reason": stop, "weight_versions": spans or None}


def main() -> None:
    assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--uds", required=True)
    arguments, _ = parser.parse_known_args(sys.argv[3:])
    if fault("unready"):
        sys.exit("told to end before it is ready")

    async def serve() -> None:
        app = FakeVllm(arguments).app()
        await uvicorn.Server(uvicorn.Config(app, uds=arguments.uds, log_level="warning")).serve()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
