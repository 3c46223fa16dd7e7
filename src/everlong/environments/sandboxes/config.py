"""Settings of the sandboxes."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from everlong.contracts.config import Config

Isolation = Literal["auto", "namespaces", "none"]


class SandboxConfig(Config):
    type: Literal["local", "scripted"] = "local"
    """local runs real commands on this machine; scripted knows echo and cat, and starts no process."""
    isolation: Isolation = "auto"
    """auto takes namespaces and says so loudly where it has to do without; namespaces refuses to start without them."""
    root: Path | None = None
    """Folder for the sandboxes' files; None is a folder of the run. What killed runs left in it is removed."""
    ttl_s: float | None = Field(None, gt=0)
    """Seconds after which a sandbox is closed, whatever happens; None for never. It must hold the time limits of agent and
    verifier of every task, and a margin."""
