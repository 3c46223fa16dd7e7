"""`everlong serve`: a run's policy over HTTP, one new session per call."""

from __future__ import annotations

import asyncio
import itertools
import signal
from pathlib import Path

from rich.console import Console

from everlong.cli.beside import NoAccount, beside_run, chosen_version
from everlong.cli.compose import make_sampling, open_cell
from everlong.cli.config import RunConfig
from everlong.cli.run_folder import RunFolder
from everlong.contracts.records import EpisodeOrder, Purpose
from everlong.environments.sandboxes.registry import scratch_folder
from everlong.rollouts.gateway.server import GatewayServer
from everlong.rollouts.gateway.session import Session

console = Console(stderr=True, highlight=False)


def serve_command(run: Path, host: str, port: int, version: int | None, key: str, allow_remote: bool) -> None:
    folder = RunFolder(run)
    config = folder.open()
    server = GatewayServer(host, port, model=folder.path.resolve().name, allow_remote=allow_remote)
    asyncio.run(_serve(config, folder, server, version, key or None))


async def _serve(
    config: RunConfig, folder: RunFolder, server: GatewayServer, version: int | None, key: str | None
) -> None:
    """Until SIGINT or SIGTERM."""
    wanted = chosen_version(config, folder, version)
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    with scratch_folder("serve") as scratch:
        aside, settings = beside_run(config, folder, scratch)
        async with open_cell(settings, aside) as cell:
            status = await cell.engine.update(wanted)
            sampling = make_sampling(settings, cell.engine)
            numbers = itertools.count()

            def new_session() -> Session:
                order = EpisodeOrder(task="", group=next(numbers), attempt=0, purpose=Purpose.EVAL)
                return Session(
                    order,
                    engine=sampling.engine,
                    renderer=sampling.renderer,
                    params=sampling.params,
                    run_seed=sampling.run_seed,
                    limits=sampling.limits,
                    journal=NoAccount(),
                    thinking=sampling.thinking,
                )

            key = server.open_endpoint(new_session, key)
            await server.start()
            console.print(f"policy version {status.policy_version} of {folder.path} at {server.url}")
            console.print(f"Anthropic's clients take {server.root_url} as base URL", highlight=False)
            console.print(f"API key {key}", markup=False)
            await stop.wait()
            await server.stop()
