"""What works beside a run without touching it: a cell of its own, and sampled tokens that no ledger accounts for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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


def chosen_version(config: RunConfig, folder: RunFolder, version: int | None) -> int:
    """The version asked for, else the newest. Raises NotFound where the run has not published it, and says what it has."""
    published = WeightReader(open_store(folder.store_url(config))).versions()
    if not published:
        raise NotFound(f"{folder.path} has published no policy version yet")
    if version is not None and version not in published:
        counted = (
            f"; the first {warm} are of the warm-up, published once" if (warm := config.warmup.num_batches) else ""
        )
        raise NotFound(
            f"version {version} is not published: there are {ranges_text(published)}. A version counts trained batches{counted}"
        )
    return published[-1] if version is None else version


def ranges_text(numbers: Sequence[int]) -> str:
    """Of ascending numbers. Example: [0, 6, 7, 8] is "0, 6 to 8"."""
    breaks = [place for place, (one, next_one) in enumerate(pairwise(numbers), 1) if next_one != one + 1]
    runs = [numbers[start:stop] for start, stop in pairwise([0, *breaks, len(numbers)])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def beside_run(config: RunConfig, folder: RunFolder, scratch: Path) -> tuple[RunFolder, RunConfig]:
    """A folder with a lock of its own, whose cell reads the run's store."""
    store = folder.absolute_store_url(config)
    trainer = config.trainer.model_copy(update={"ranks": 1})  # nothing is trained here
    settings = config.model_copy(
        update={"weights": config.weights.model_copy(update={"store": store}), "trainer": trainer}
    )
    aside = RunFolder(scratch)
    aside.create(settings, folder.read_origin())
    return aside, settings
