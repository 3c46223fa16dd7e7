"""From settings to a backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from everlong.contracts.ports import SandboxBackend
from everlong.environments.sandboxes.config import SandboxConfig
from everlong.environments.sandboxes.local import LocalBackend
from everlong.environments.sandboxes.scripted import ScriptedBackend

_LOG = logging.getLogger(__name__)


def open_backend(config: SandboxConfig, run_folder: Path, warn: Callable[[str], None] = _LOG.warning) -> SandboxBackend:
    """The backend that `config` names; `warn` is told once if it isolates less than it could. Raises SandboxError."""
    if config.type == "scripted":
        return ScriptedBackend(scratch=run_folder)
    return LocalBackend(config.root or run_folder / "sandboxes", isolation=config.isolation, warn=warn)
