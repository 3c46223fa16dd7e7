"""Settings of the sandboxes."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from everlong.contracts.config import Config

Isolation = Literal["auto", "namespaces", "none"]


class SandboxConfig(Config):
    type: Literal["local", "gvisor", "scripted"] = "local"
    """local runs real commands on this machine; gvisor runs them above a kernel of their own, and can put them on disk;
    scripted knows echo and cat, and starts no process."""
    isolation: Isolation = "auto"
    """auto takes namespaces and says so loudly where it has to do without; namespaces refuses to start without them."""
    root: Path | None = None
    """Folder for the sandboxes' files; None is a folder of the run. What killed runs left in it is removed."""
    ttl_s: float | None = Field(None, gt=0)
    """Seconds after which a sandbox is closed, whatever happens; None for never. It must hold the time limits of agent and
    verifier of every task, and a margin."""
    runsc: Path | None = None
    """gVisor's program; None takes RUNSC, what `make gvisor` fetched, or the one on the PATH."""
    pause_after_s: float | None = Field(None, gt=0)
    """Seconds without a call after which a gvisor sandbox goes to disk until the next one; None keeps it in memory, unless
    `max_resident` needs its place."""
    max_resident: int | None = Field(None, ge=2)
    """gvisor sandboxes that hold memory at once; calls beyond wait for a place. A fork needs two. None is no limit."""
