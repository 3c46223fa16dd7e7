"""The run's config as TOML, and back; what was left out is written with the value it got."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from everlong.cli.config import RunConfig
from everlong.cli.mistakes import explain
from everlong.environments.tasks.toml_writer import write_toml


def config_text(config: RunConfig) -> str:
    """Every setting; "None" stands for a setting that is off, since TOML has no word for it."""
    return write_toml(_plain(config.model_dump(mode="json")))


def write_config(config: RunConfig, path: Path) -> None:
    scratch = path.with_suffix(".partial")
    scratch.write_text(config_text(config))
    os.replace(scratch, path)


def read_config(path: Path) -> RunConfig:
    """Raises ValueError that names the file where it is no TOML or no run's config."""
    try:
        return RunConfig.model_validate(tomllib.loads(path.read_text()))
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error)}") from error
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from error


def _plain(value: Any) -> Any:
    if value is None:
        return "None"
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
