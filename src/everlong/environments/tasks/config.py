"""Which tasks a run uses."""

from __future__ import annotations

from pathlib import Path

from everlong.contracts.config import Config


class TasksConfig(Config):
    """Each path is a task folder or a folder of task folders."""

    train: tuple[Path, ...] = ()
    """Tasks that train."""
    eval: tuple[Path, ...] = ()
    """Held-out tasks that are only evaluated."""
