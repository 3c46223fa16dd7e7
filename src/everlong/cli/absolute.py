"""A run's paths without the folder that it was started from, so that the saved config means the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from everlong.cli.config import RunConfig
from everlong.contracts.config import Config

C = TypeVar("C", bound=Config)


def absolute_paths(config: RunConfig) -> RunConfig:
    """The config with every path absolute. Links are kept: a Python behind one belongs to the environment that the link lies in."""
    config = _absolute_config(config)
    store = config.weights.store
    if store is None or "://" in store:
        return config
    weights = config.weights.model_copy(update={"store": str(_absolute(Path(store)))})
    return config.model_copy(update={"weights": weights})


def _absolute_config(config: C) -> C:
    values = {name: getattr(config, name) for name in type(config).model_fields}
    found = {name: _absolute(value) for name, value in values.items()}
    return config.model_copy(update={name: value for name, value in found.items() if value != values[name]})


def _absolute(value: object) -> object:
    if isinstance(value, Config):
        return _absolute_config(value)
    if isinstance(value, tuple):
        return tuple(_absolute(item) for item in value)
    return value.expanduser().absolute() if isinstance(value, Path) else value
