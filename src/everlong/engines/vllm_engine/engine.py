"""The engine port in front of a vLLM server that may die at any moment.

A request whose server died is asked again of the next one: nobody has seen an answer, so nothing is lost. A new server
holds no weights until the version that its predecessor held is loaded, and requests wait for that. Weights change in a
server that is paused and keeps its requests; their tokens carry each its version, and their keys and values stay. New
prompts never find those of old weights, because the prefix cache is salted with the weights' fingerprint.

A server that hangs is one that died. In a pool a lost server is the pool's business: requests end with EngineLost at once, to
be asked elsewhere, and the pool's next `update` brings the server back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from everlong import __version__
from everlong.contracts.errors import EngineError, EngineLost
from everlong.contracts.records import EngineStatus, FinishReason, GenerateReply, GenerateRequest, PublishedVersion
from everlong.contracts.tokens import NO_VERSION, TokenColumns
from everlong.engines.config import VllmConfig
from everlong.engines.requests import check_request, check_version
from everlong.engines.vllm_engine.client import ServerLost, VllmClient
from everlong.engines.vllm_engine.protocol import Transcript, check_supported, generate_body
from everlong.engines.vllm_engine.pulse import Pulse
from everlong.engines.vllm_engine.restarts import Restarts
from everlong.engines.vllm_engine.server import Server, check_server, reports
from everlong.weights import WeightReader

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
WIRE_PREFIX = "generate-tokens-"
"""What the server puts before the id that it was given."""
ABORT_EVERY_S = 0.2
"""An abort that overtakes its request finds nothing to stop, so it is said again until the request has ended."""
GAUGES = {
    "vllm:num_requests_waiting": "server_waiting",
    "vllm:kv_cache_usage_perc": "cache_used",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prompt_tokens",
    "vllm:prefix_cache_hits_total": "prefix_hit_tokens",
    "vllm:generation_tokens_total": "tokens_sampled",
}
"""Prometheus names of the server, and what the same is called here."""


@dataclass(slots=True, eq=False)
class _Flight:
    """A request under way."""

    request: GenerateRequest
    wire_id: str
    max_tokens: int
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class VllmEngine:
    """An `Engine`. The server is started by the first `update`; until then every request is refused.

    `store_url` must mean the same to the server: a URL, or an absolute folder on a disk that both see.
    """

    def __init__(
        self,
        server: Server,
        reader: WeightReader,
        *,
        store_url: str,
        token_bytes: Sequence[bytes],
        context: int,
        config: VllmConfig,
        pooled: bool = False,
    ) -> None:
        """`pooled`: others may answer a request whose server is lost."""
        self._server, self._reader, self._store_url = server, reader, store_url
        self._token_bytes, self._context, self._config = token_bytes, context, config
        self._pooled = pooled
        self._client: VllmClient | None = None
        self._pulse: Pulse | None = None
        """Of the client; both are there or neither is."""
        self._trouble = ""
        self._held: PublishedVersion | None = None
        """The version that the server holds, or will hold before it is asked again."""
        self._generation = 0
        """Counts the servers; a request that lost an older one finds the next already there."""
        self._changing = asyncio.Lock()
        """Held while the server is started or its weights change."""
        self._restarts = Restarts(config.max_restarts)
        self._flights: set[_Flight] = set()
        self._numbers = itertools.count()
        self._refusal: str | None = None
        self._closing = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        if self._refusal is not None:
            raise EngineError(self._refusal)
        max_tokens = check_request(request, vocab_size=len(self._token_bytes), context=self._context)
        check_supported(request.params, returns_sampling_mask=self._config.returns_sampling_mask)
        check_version(request, self._version)
        flight = _Flight(request, f"{request.request_id}.{next(self._numbers)}", max_tokens)
        self._flights.add(flight)
        try:
            return await self._unless_closed(flight)
        finally:
            self._flights.discard(flight)

    async def abort(self, request_ids: tuple[str, ...]) -> None:
        for flight in self._flights:
            if flight.request.request_id in request_ids:
                flight.aborted.set()

    async def update(self, policy_version: int) -> EngineStatus:
        if self._refusal is not None:
            raise EngineError(self._refusal)
        wanted = await asyncio.to_thread(self._reader.manifest, policy_version)
        async with self._changing:
            if self._held is None or policy_version != self._held.version or self._client is None:
                await self._bring_to(wanted)
        return await self.status()

    async def status(self) -> EngineStatus:
        gauges = await self._gauges()
        waiting = min(len(self._flights), int(gauges.pop("server_waiting", 0)))
        return EngineStatus(
            policy_version=self._version,
            fingerprint=self._fingerprint,
            num_running=len(self._flights) - waiting,
            num_waiting=waiting,
            metrics={**gauges, "server_losses": float(self._restarts.total)},
            trouble=self._trouble,
        )

    async def close(self) -> None:
        """Whoever still waits gets an EngineError."""
        self._refuse("the engine is closed")
        self._closing.set()
        async with self._changing:
            await self._server.stop()
            self._client = self._pulse = None

    @property
    def _version(self) -> int:
        return NO_VERSION if self._held is None else self._held.version

    @property
    def _fingerprint(self) -> str:
        return "" if self._held is None else self._held.fingerprint

    # Requests --------------------------------------------------------------------------------------------------------

    async def _unless_closed(self, flight: _Flight) -> GenerateReply:
        answering = asyncio.ensure_future(self._answer(flight))
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait({answering, closing}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                raise EngineError(self._refusal)
            return answering.result()
        finally:
            closing.cancel()
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)

    async def _answer(self, flight: _Flight) -> GenerateReply:
        """Ask, and ask again of the next server while one is to be had."""
        while True:
            async with self._changing:
                generation, client, pulse, salt = self._generation, self._client, self._pulse, self._fingerprint
            if self._refusal is not None:
                raise EngineError(self._refusal)
            if flight.aborted.is_set():
                return _nothing_sampled(flight.request)
            try:
                if client is None or pulse is None:
                    raise ServerLost("the vLLM server did not come back")
                reply = await pulse.guard(self._ask(client, pulse, flight, salt))
            except ServerLost as loss:
                await self._recover(generation, loss)
            except EngineError:
                if client is None or await client.is_healthy():
                    raise
                await self._recover(generation, ServerLost("the vLLM server says that it is not healthy"))
            else:
                self._restarts.answered()
                return reply

    async def _ask(self, client: VllmClient, pulse: Pulse, flight: _Flight, salt: str) -> GenerateReply:
        body = generate_body(
            flight.request,
            wire_id=flight.wire_id,
            max_tokens=flight.max_tokens,
            vocab_size=len(self._token_bytes),
            cache_salt=salt,
        )
        transcript = Transcript(flight.request, self._token_bytes)
        stopping = asyncio.create_task(_abort_when_told(client, flight.aborted, flight.wire_id))
        try:
            async with contextlib.aclosing(client.stream(GENERATE, body)) as chunks:
                async for chunk in chunks:
                    pulse.heard()
                    if transcript.feed(chunk):
                        flight.aborted.set()  # a stop string came: the server knows no text
        finally:
            stopping.cancel()
        return transcript.reply()

    # The server ------------------------------------------------------------------------------------------------------

    async def _bring_to(self, wanted: PublishedVersion) -> None:
        """Load a version, starting a server where there is none, and anew when it dies over it. In a pool requests that wait for
        the load are let go first: raises EngineLost."""
        served = self._client is not None
        while True:
            client, pulse = self._client, self._pulse
            try:
                if client is None or pulse is None:
                    client, pulse = self._client, self._pulse = await self._start()
                await pulse.guard(self._load(client, wanted))
            except ServerLost as loss:
                if self._client is client:  # else a request of it was first
                    self._give_up(loss)
                if served and self._pooled:
                    raise EngineLost(self._trouble) from loss
            else:
                self._held, self._trouble = wanted, ""
                self._restarts.answered()
                return

    async def _start(self) -> tuple[VllmClient, Pulse]:
        client = await self._server.start()
        self._generation += 1
        pulse = Pulse(client)
        await pulse.guard(self._prepare(client))
        return client, pulse

    async def _prepare(self, client: VllmClient) -> None:
        await check_server(client, everlong_version=__version__, context=self._context)
        await client.post("/init_weight_transfer_engine", {"init_info": {"store": self._store_url}})

    def _give_up(self, loss: ServerLost) -> None:
        """The server is lost. Raises EngineError where it is not to be brought back once more."""
        self._client = self._pulse = None
        if not self._restarts.lost():
            self._refuse(f"the vLLM server was lost {self._restarts.in_a_row} times in a row, lastly: {loss}")
            self._trouble = self._refusal or ""
            raise EngineError(self._refusal) from loss
        self._trouble = f"{loss}; {self._server.remedy}"

    async def _recover(self, generation: int, loss: ServerLost) -> None:
        """Bring a server with the weights of the lost one; whoever comes later finds it. Raises EngineError."""
        if self._pooled:
            if generation == self._generation and self._client is not None:
                self._give_up(loss)
            raise EngineLost(self._refusal or self._trouble or str(loss)) from loss
        async with self._changing:
            if generation != self._generation or self._refusal is not None:
                return
            self._give_up(loss)
            assert self._held is not None
            await self._bring_to(self._held)

    async def _load(self, client: VllmClient, wanted: PublishedVersion) -> None:
        """Pause, load, verify, go on. A version that cannot be read leaves the server with what it had."""
        await client.post("/pause?mode=keep")
        try:
            await client.post("/start_weight_update")
            await client.post("/update_weights", {"update_info": {"version": wanted.version}})
            await self._verify(client, wanted)
            await client.post("/finish_weight_update", {"weight_version": str(wanted.version)})
        except ServerLost:
            raise
        except EngineError as error:
            await self._keep_what_it_had(client, error)
            raise
        await client.post("/resume")

    async def _verify(self, client: VllmClient, wanted: PublishedVersion) -> None:
        for report in await reports(client):
            if (report["version"], report["fingerprint"]) != (wanted.version, wanted.fingerprint):
                raise EngineError(
                    f"version {wanted.version} was published with fingerprint {wanted.fingerprint}, the vLLM server loaded "
                    f"version {report['version']} with {report['fingerprint']}"
                )

    async def _keep_what_it_had(self, client: VllmClient, error: EngineError) -> None:
        """After a failed update: go on where every worker still holds the old version, else refuse from now on."""
        held = {(report["version"], report["fingerprint"]) for report in await reports(client)}
        if self._held is None or held != {(self._held.version, self._held.fingerprint)}:
            self._refuse(f"the vLLM server holds no whole version after a failed update, restart the run: {error}")
            return
        await client.post("/resume")

    async def _gauges(self) -> dict[str, float]:
        """What the server counts; nothing where it cannot be asked."""
        if self._client is None:
            return {}
        try:
            text = await self._client.text("/metrics")
        except EngineError:
            return {}
        return read_gauges(text)

    def _refuse(self, why: str) -> None:
        """The first reason stays."""
        self._refusal = self._refusal or why


async def _abort_when_told(client: VllmClient, aborted: asyncio.Event, wire_id: str) -> None:
    await aborted.wait()
    while True:
        with contextlib.suppress(EngineError):  # whoever reads the stream meets a lost server too
            await client.post(ABORT, {"request_ids": [WIRE_PREFIX + wire_id]})
        await asyncio.sleep(ABORT_EVERY_S)


def _nothing_sampled(request: GenerateRequest) -> GenerateReply:
    columns = TokenColumns.sampled_tokens([], [], version=[], temperature=request.params.temperature)
    return GenerateReply(request_id=request.request_id, columns=columns, finish_reason=FinishReason.ABORT)


def read_gauges(text: str) -> dict[str, float]:
    """Out of Prometheus text, summed over the labels of each name."""
    values: dict[str, float] = {}
    for name, value in re.findall(r"^(vllm:\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        if name in GAUGES:
            values[GAUGES[name]] = values.get(GAUGES[name], 0.0) + float(value)
    return values
