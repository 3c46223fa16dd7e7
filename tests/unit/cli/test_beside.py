"""Which policy version `eval` and `serve` take."""

from pathlib import Path

import pytest

from everlong.cli.beside import beside_run, chosen_version, ranges_text
from everlong.cli.config import RunConfig
from everlong.cli.run_folder import RunFolder
from everlong.contracts.errors import NotFound
from everlong.storage import open_store
from everlong.weights.manifest import VERSIONS


def published(tmp_path: Path, *versions: int) -> tuple[RunConfig, RunFolder]:
    store = open_store(str(tmp_path / "store"))
    for version in versions:
        store.put(f"{VERSIONS}{version:08d}", b"")
    return RunConfig.model_validate({"warmup": {"num_batches": 6}}), RunFolder(tmp_path)


def test_the_newest_is_taken_where_none_is_asked_for(tmp_path: Path) -> None:
    run = published(tmp_path, 6, 7, 8)
    assert (chosen_version(*run, None), chosen_version(*run, 7)) == (8, 7)


@pytest.mark.parametrize("version", [3, 9, -1])
def test_a_version_that_was_not_published_is_refused_with_those_that_were(tmp_path: Path, version: int) -> None:
    with pytest.raises(
        NotFound, match=f"version {version} is not published: there are 6 to 8.*first 6 are of the warm-up"
    ):
        chosen_version(*published(tmp_path, 6, 7, 8), version)


def test_a_run_that_has_published_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no policy version yet"):
        chosen_version(*published(tmp_path), None)


@pytest.mark.parametrize(
    ("numbers", "text"), [([0, 6, 7, 8], "0, 6 to 8"), ([4], "4"), ([1, 2], "1 to 2"), ([1, 3, 5], "1, 3, 5")]
)
def test_numbers_in_a_row_are_one_range(numbers: list[int], text: str) -> None:
    assert ranges_text(numbers) == text


def test_a_cell_beside_the_run_trains_nothing_and_starts_no_ranks(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"output": tmp_path / "run", "trainer": {"ranks": 4}})
    folder = RunFolder(config.output)
    folder.create(config)
    aside, settings = beside_run(config, folder, tmp_path / "aside")
    assert settings.trainer.ranks == aside.open().trainer.ranks == 1
    assert settings.weights.store == folder.absolute_store_url(config)
