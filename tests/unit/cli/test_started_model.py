"""Which model a run was started with: whoever opens the run with another one is told so, before anything is computed with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.unit.trainer.tiny import SHAPE, tiny

from everlong.cli.config import RunConfig
from everlong.cli.run_folder import RunFolder
from everlong.cli.started_model import KEY, refuse_other_model
from everlong.cli.store_owner import claim_store
from everlong.contracts.errors import StoreError
from everlong.models.config import FolderModel, ToyModel
from everlong.models.source import ModelSource
from everlong.storage import open_store


class Opened:
    """A model folder and a run's store, opened as often as wanted."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder, self.store, self.network = tmp_path / "model", open_store(str(tmp_path / "store")), tiny()
        self.folder.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (self.folder / name).write_text("{}")
        self.config = RunConfig(model=FolderModel(path=self.folder))

    def open(self) -> None:
        refuse_other_model(self.config, ModelSource(SHAPE, self.folder), self.network, self.store)

    def change_weights(self) -> None:
        with torch.no_grad():
            next(iter(self.network.named_weights().values()))[0, 0] += 1e-3


@pytest.fixture
def opened(tmp_path: Path) -> Opened:
    return Opened(tmp_path)


def test_the_same_model_is_let_through_and_another_named_with_both_fingerprints(opened: Opened) -> None:
    opened.open()
    known = json.loads(opened.store.get(KEY))["weights"]
    opened.open()
    opened.change_weights()
    message = f"model {opened.folder} is not what the run was started with: its weights have the fingerprint (?!{known}).*, and had {known}"
    with pytest.raises(ValueError, match=message):
        opened.open()
    assert json.loads(opened.store.get(KEY))["weights"] == known


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_file_beside_the_weights_counts_as_well(name: str, opened: Opened) -> None:
    opened.open()
    (opened.folder / name).write_text('{"other": 1}')
    with pytest.raises(
        ValueError, match=f"its {name} has the hash [0-9a-f]{{32}}, and had [0-9a-f]{{32}}: restore its files"
    ):
        opened.open()


@pytest.mark.parametrize("key", ["checkpoints/000002/manifest.json", "weights/versions/00000000"])
def test_an_older_run_that_wrote_nothing_down_goes_on(key: str, opened: Opened) -> None:
    opened.store.put(key, b"")
    opened.open()
    opened.change_weights()
    opened.open()
    assert opened.store.list(KEY) == []


def test_a_record_of_a_start_that_came_to_nothing_binds_nobody(tmp_path: Path, opened: Opened) -> None:
    opened.open()
    config = opened.config.model_copy(
        update={"weights": opened.config.weights.model_copy(update={"store": str(tmp_path / "store")})}
    )
    claim_store(config, RunFolder(tmp_path / "run"))
    opened.change_weights()
    opened.open()


def test_a_damaged_record_is_named(opened: Opened) -> None:
    opened.store.put(KEY, b"{")
    with pytest.raises(StoreError, match="started-model.json .* is damaged"):
        opened.open()


@pytest.mark.parametrize(("numerics", "refused"), [("fast", False), ("aligned", True)])
def test_a_toy_that_another_cpu_built_is_let_through_where_no_bits_are_promised(
    numerics, refused, opened: Opened
) -> None:
    opened.config = RunConfig(model=ToyModel(), numerics=numerics)

    def open_toy() -> None:
        refuse_other_model(opened.config, ModelSource(SHAPE, None), opened.network, opened.store)

    open_toy()
    opened.change_weights()
    if refused:
        with pytest.raises(ValueError, match="model toy is not what .* a CPU of the kind that it was built on"):
            open_toy()
    else:
        open_toy()
