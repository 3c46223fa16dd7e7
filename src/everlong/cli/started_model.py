"""Which model a run was started with, as its store remembers it: whoever builds the model later compares.

Before the first checkpoint and the first version nothing else would notice that the model's files were exchanged.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from blake3 import blake3

from everlong.cli.config import RunConfig
from everlong.contracts.errors import AlreadyExists, NotFound, StoreError
from everlong.contracts.ports import ObjectStore
from everlong.contracts.records import Record
from everlong.models.config import FolderModel, HubModel, ModelConfig, OwnModel, ToyModel, ToyMoeModel
from everlong.models.source import ModelSource

if TYPE_CHECKING:
    from everlong.models.llama.model import Llama

KEY = "started-model.json"
_READ = ("config.json", "tokenizer.json")
"""What decides, beside the weights, what a token is and how it is computed."""
_LATER = ("checkpoints", "weights/versions")
"""A store that holds something below these and no record is of a run that wrote none."""


class StartedModel(Record, frozen=True, kw_only=True):
    """Example: StartedModel(weights="5d0e…", files={"config.json": "77a1…", "tokenizer.json": "c0de…"})"""

    weights: str
    """Fingerprint of the network as it was read or built, without adapters."""
    files: dict[str, str]
    """Hash of each file beside the weights, by name; of a model that the run's user keeps."""


def refuse_other_model(config: RunConfig, source: ModelSource, network: Llama, store: ObjectStore) -> None:
    """Write down what the model is, where the run is new, else compare.

    Raises ValueError that names the model and both fingerprints where it is another one. A toy in fast numerics is let through:
    its config says it whole, and its random numbers have other last bits on another kind of CPU.
    """
    from everlong.engines.torch_engine.loading import fingerprint_of_model

    found = StartedModel(weights=fingerprint_of_model(network), files=_files(config.model, source))
    known = _recorded(store)
    if known is None and not any(store.list(prefix) for prefix in _LATER):
        known = _record(store, found)
    if known is None or (isinstance(config.model, ToyModel | ToyMoeModel) and config.numerics == "fast"):
        return
    pairs = [("its weights have the fingerprint", known.weights, found.weights)]
    for name in sorted(known.files.keys() | found.files.keys()):
        pairs.append((f"its {name} has the hash", known.files.get(name, "none"), found.files.get(name, "none")))
    for what, before, now in pairs:
        if before != now:
            raise ValueError(
                f"model {_name(config.model)} is not what the run was started with: {what} {now}, and had {before}: "
                f"{_advice(config.model, source)}"
            )


def _recorded(store: ObjectStore) -> StartedModel | None:
    try:
        return msgspec.json.decode(store.get(KEY), type=StartedModel)
    except NotFound:
        return None
    except msgspec.DecodeError as error:
        raise StoreError(
            f"{KEY} in {store!r} is damaged ({error}): restore it, or remove it to go on unchecked"
        ) from error


def _record(store: ObjectStore, found: StartedModel) -> StartedModel | None:
    try:
        store.create(KEY, msgspec.json.encode(found))
    except AlreadyExists:
        return _recorded(store)
    return found


def _files(model: ModelConfig, source: ModelSource) -> dict[str, str]:
    if not isinstance(model, FolderModel | HubModel | OwnModel) or source.folder is None:
        return {}
    there = [source.folder / name for name in _READ if (source.folder / name).is_file()]
    return {path.name: _hash(path) for path in there}


def _hash(path: Path) -> str:
    return blake3(path.read_bytes()).hexdigest(16)


def _name(model: ModelConfig) -> str:
    match model:
        case FolderModel():
            return str(model.path)
        case HubModel():
            return f"{model.repo} at {model.revision}"
        case OwnModel():
            return model.source
        case _:
            return model.type


def _advice(model: ModelConfig, source: ModelSource) -> str:
    match model:
        case HubModel():
            return "name in model.revision of the run's config.toml the commit that it began with, or start a new run"
        case FolderModel():
            return "restore its files, or start a new run"
    if source.folder is None:
        return "restore its code, go on with a CPU of the kind that it was built on, or start a new run"
    return "restore its files, or start a new run"
