"""Where the vLLM server comes from: a process of ours, started anew when it died, or one that somebody else runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from everlong.contracts.errors import EngineError
from everlong.engines.config import VllmConfig
from everlong.engines.vllm_engine import launcher
from everlong.engines.vllm_engine.client import ServerLost, VllmClient

DEFAULT_PYTHON = Path(".venv-vllm/bin/python")
POLL_S = 0.2
EXIT_TIMEOUT_S = 20.0
LOG_CHARS = 2000


class Server(Protocol):
    @property
    def remedy(self) -> str:
        """What is done, or to be done, when it is lost."""
        ...

    async def start(self) -> VllmClient:
        """A client of a server that answers; one that is left of an earlier start is ended. Raises ServerLost."""
        ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the server is told of the model; its weights come from the store."""

    hf_config: dict[str, Any]
    """Content of config.json, without rows that pad the vocabulary."""
    dtype: str
    context: int
    """Tokens of prompt and answer."""


class StartedServer:
    """Listens on a socket file in a folder of its own: its control calls are nobody else's business."""

    def __init__(self, config: VllmConfig, model: ServedModel, *, log: Path, threads: int | None) -> None:
        self._config, self._model, self._log, self._threads = config, model, log, threads
        self._python = find_python(config.python)
        self._process: asyncio.subprocess.Process | None = None
        self._client: VllmClient | None = None

    @property
    def remedy(self) -> str:
        return f"it is ended and started again; what it said stands at the end of {self._log}"

    async def start(self) -> VllmClient:
        await self.stop()
        folder = Path(tempfile.mkdtemp(prefix="everlong-vllm-"))
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(self._model.hf_config))
        socket = folder / "socket"
        command = server_command(self._python, self._config, self._model, folder / "model", socket)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as out:
            self._process = await asyncio.create_subprocess_exec(
                *[sys.executable, launcher.__file__, str(folder), *command],
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=out,
                env={**os.environ, **server_environment(self._threads)},
            )
        self._client = VllmClient("http://vllm", uds=str(socket))
        await self._until_it_answers(self._process, self._client)
        return self._client

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), EXIT_TIMEOUT_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
            self._process = None

    async def _until_it_answers(self, process: asyncio.subprocess.Process, client: VllmClient) -> None:
        deadline = asyncio.get_running_loop().time() + self._config.start_timeout_s
        while not await client.is_healthy():
            if process.returncode is not None:
                raise ServerLost(f"the vLLM server ended while it started; the end of {self._log}:\n{self._tail()}")
            if asyncio.get_running_loop().time() > deadline:
                raise ServerLost(
                    f"the vLLM server did not answer within engine.start_timeout_s={self._config.start_timeout_s:g} s; the "
                    f"end of {self._log}:\n{self._tail()}"
                )
            await asyncio.sleep(POLL_S)

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-LOG_CHARS:]


class GivenServer:
    """Somebody else runs it: it is waited for, never started or stopped."""

    def __init__(self, url: str, start_timeout_s: float) -> None:
        self._url, self._timeout_s = url, start_timeout_s
        self._client: VllmClient | None = None

    @property
    def remedy(self) -> str:
        return f"start it again at {self._url}: it is waited for engine.start_timeout_s={self._timeout_s:g} s"

    async def start(self) -> VllmClient:
        await self.stop()
        self._client = VllmClient(self._url)
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        while not await self._client.is_healthy():
            if asyncio.get_running_loop().time() > deadline:
                raise ServerLost(
                    f"no vLLM server answers at {self._url} since engine.start_timeout_s={self._timeout_s:g} s: start it as "
                    "docs/engines.md says, or leave engine.url out"
                )
            await asyncio.sleep(POLL_S)
        return self._client

    async def stop(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


def find_python(given: Path | None) -> Path:
    """Of the environment that holds vLLM. Raises ValueError where there is none."""
    named = given or (Path(os.environ["EVERLONG_VLLM"]) if os.environ.get("EVERLONG_VLLM") else None)
    python = named or DEFAULT_PYTHON
    if python.is_file() and os.access(python, os.X_OK):
        return python.absolute()
    where = "engine.python" if given else "EVERLONG_VLLM" if named else "the default"
    raise ValueError(
        f"engine.type=vllm needs the Python of an environment with vLLM; {where} names {python}, and no program is there: "
        "`make vllm` builds .venv-vllm (3.5 GB), engine.python or EVERLONG_VLLM name another, engine.url a server that runs"
    )


def server_command(python: Path, config: VllmConfig, model: ServedModel, folder: Path, socket: Path) -> Sequence[str]:
    """`python -m` and not `vllm serve`, which asks for a distribution named vllm; the CPU build has another name."""
    return [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder), "--load-format", "dummy", "--tokens-only", "--generation-config", "vllm"),
        *("--dtype", model.dtype, "--max-model-len", str(model.context), "--max-num-seqs", str(config.max_running)),
        *("--kv-cache-memory-bytes", str(config.cache_mb << 20)),
        "--enable-prefix-caching" if config.prefix_cache else "--no-enable-prefix-caching",
        *(() if config.compile else ("--enforce-eager",)),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs=-1", "--enable-prompt-tokens-details"),
        *("--worker-extension-cls", "everlong.engines.vllm_engine.plugin.WorkerExtension"),
        *("--weight-transfer-config", '{"backend": "everlong"}'),
        *("--uds", str(socket), "--disable-uvicorn-access-log"),
        *config.arguments,
    ]


def server_environment(threads: int | None) -> dict[str, str]:
    """`nobind`: else the CPU build keeps one core for itself and pins its worker to the others."""
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return environment if threads is None else {**environment, "OMP_NUM_THREADS": str(threads)}


async def check_server(client: VllmClient, *, everlong_version: str, context: int) -> None:
    """Raises EngineError where this is no server that the engine was written for."""
    version = (await client.get("/version"))["version"]
    if tuple(int(part) for part in version.split(".")[:2]) != (0, 32):
        raise EngineError(f"the engine was written for vLLM 0.32, the server has {version}: install vllm 0.32 for it")
    (held,) = {report["everlong"] for report in await reports(client)}
    if held != everlong_version:
        raise EngineError(
            f"this is everlong {everlong_version}, the vLLM server's environment holds {held}: build it again with "
            "`make vllm`"
        )
    room = (await client.get("/v1/models"))["data"][0]["max_model_len"]
    if room < context:
        raise EngineError(
            f"a request may have {context} tokens, the vLLM server takes {room}: start it with more, or lower engine.max_context"
        )


async def reports(client: VllmClient) -> list[dict[str, Any]]:
    """What each worker of the server says that it holds."""
    return (await client.post("/collective_rpc", {"method": "everlong_report"}))["results"]
