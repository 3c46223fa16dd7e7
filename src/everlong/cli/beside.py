"""What works beside a run without touching it: a cell of its own, and sampled tokens that no ledger accounts for."""

from __future__ import annotations

from pathlib import Path

from everlong.cli.config import RunConfig
from everlong.cli.run_folder import RunFolder
from everlong.contracts.errors import NotFound
from everlong.contracts.records import EpisodeOrder
from everlong.storage import open_store
from everlong.weights import WeightReader


class NoAccount:
    """What is sampled beside a run teaches nobody; the run's ledger is not touched."""

    async def turn_sampled(self, order: EpisodeOrder, turn: int, num_tokens: int) -> None:
        """Nothing to write."""

    async def tokens_discarded(self, order: EpisodeOrder, num_tokens: int, reason: str) -> None:
        """Nothing to write."""

    async def call_uncounted(self, order: EpisodeOrder, max_tokens: int, reason: str) -> None:
        """Nothing to write."""


def newest_version(config: RunConfig, folder: RunFolder) -> int:
    """Raises NotFound where the run has published none."""
    newest = WeightReader(open_store(folder.store_url(config))).latest()
    if newest is None:
        raise NotFound(f"{folder.path} has published no policy version yet")
    return newest


def chosen_version(config: RunConfig, folder: RunFolder, version: int | None) -> int:
    """The version asked for, else the newest. Raises NotFound where the run has not published it."""
    newest = newest_version(config, folder)
    if version is not None and not 0 <= version <= newest:
        raise NotFound(f"version {version} is not published: the newest in the store is {newest}")
    return newest if version is None else version


def beside_run(config: RunConfig, folder: RunFolder, scratch: Path) -> tuple[RunFolder, RunConfig]:
    """A folder with a lock of its own, whose cell reads the run's store."""
    store = folder.absolute_store_url(config)
    settings = config.model_copy(update={"weights": config.weights.model_copy(update={"store": store})})
    aside = RunFolder(scratch)
    aside.create(settings)
    return aside, settings
