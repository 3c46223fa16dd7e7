"""Which tasks a run uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator

from everlong.contracts.config import Config


def _one_or_many(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("["):
        return json.loads(value)
    return (value,) if isinstance(value, str | Path) else value


Paths = Annotated[tuple[Path, ...], BeforeValidator(_one_or_many)]
"""One path or several; on a command line several are a JSON list."""


class TasksConfig(Config):
    """Each path is a task folder or a folder of task folders."""

    train: Paths = ()
    """Tasks that train."""
    eval: Paths = ()
    """Held-out tasks that are only evaluated."""
