"""From settings to a backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from everlong.contracts.ports import SandboxBackend
from everlong.environments.sandboxes.config import SandboxConfig
from everlong.environments.sandboxes.gvisor import GvisorBackend
from everlong.environments.sandboxes.local import LocalBackend
from everlong.environments.sandboxes.pool import PooledBackend
from everlong.environments.sandboxes.scripted import ScriptedBackend

_LOG = logging.getLogger(__name__)


def open_backend(config: SandboxConfig, run_folder: Path, warn: Callable[[str], None] = _LOG.warning) -> SandboxBackend:
    """The backend that `config` names; `warn` is told once if it isolates less than it could. Raises SandboxError."""
    if config.type == "scripted":
        return ScriptedBackend(scratch=run_folder)
    root = config.root or run_folder / "sandboxes"
    if config.type == "gvisor":
        gvisor = GvisorBackend(root, runsc=config.runsc)
        if config.pause_after_s is None and config.max_resident is None:
            return gvisor
        return PooledBackend(gvisor, pause_after_s=config.pause_after_s, max_resident=config.max_resident)
    return LocalBackend(root, isolation=config.isolation, warn=warn)
