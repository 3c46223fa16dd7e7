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
from everlong.cli.event_loop import run_to_the_end
from everlong.cli.run_folder import RunFolder
from everlong.contracts.records import EpisodeOrder, Purpose
from everlong.environments.sandboxes.registry import scratch_folder
from everlong.observe import Stages
from everlong.rollouts.gateway.server import GatewayServer, is_loopback, listen
from everlong.rollouts.gateway.session import Session

console = Console(stderr=True, highlight=False)


def serve_command(run: Path, host: str, port: int, version: int | None, key: str, allow_remote: bool) -> None:
    if not allow_remote and not is_loopback(host):
        raise ValueError(
            f"--host {host} can be reached from elsewhere, and everyone there can try keys: add --allow-remote if that is "
            "meant, or leave --host out to listen on this machine only"
        )
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must be 0 to 65535, got {port}: 0 takes a free one")
    folder = RunFolder(run)
    config = folder.open()
    listen(host, port).close()  # before the model is loaded for nothing
    server = GatewayServer(host, port, model=folder.path.resolve().name, allow_remote=allow_remote)
    run_to_the_end(_serve(config, folder, server, version, key or None))


async def _serve(
    config: RunConfig, folder: RunFolder, server: GatewayServer, version: int | None, key: str | None
) -> None:
    """Until SIGINT or SIGTERM."""
    wanted, stages = chosen_version(config, folder, version), Stages(console)
    with scratch_folder("serve") as scratch:
        aside, settings = beside_run(config, folder, scratch)
        async with open_cell(settings, aside, stages) as cell:
            with stages.stage(f"loading policy version {wanted}"):
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
            stop = asyncio.Event()
            for name in (signal.SIGINT, signal.SIGTERM):  # until here Ctrl-C cancels what is under way
                asyncio.get_running_loop().add_signal_handler(name, stop.set)
            await stop.wait()
            await server.stop()
