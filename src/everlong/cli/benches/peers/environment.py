"""The peers' environment: made when a bench first needs it, or by `make peers`, and made again when its pins change."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from everlong.models.smollm2 import cache_folder

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "trl")
CONSTRAINTS = Path(__file__).with_name("constraints.txt")


def peers_folder() -> Path:
    """EVERLONG_PEERS, else a folder of the cache."""
    chosen = os.environ.get("EVERLONG_PEERS")
    return Path(chosen) if chosen else cache_folder() / "peers"


def peers_python() -> Path:
    """The environment's interpreter. Raises ChildProcessError where it cannot be made; what pip said is on the terminal."""
    folder = peers_folder()
    python, stamp, pins = folder / "bin" / "python", folder / "constraints.txt", CONSTRAINTS.read_text()
    if stamp.is_file() and stamp.read_text() == pins:
        return python
    print(
        f"peers: installs {', '.join(PACKAGES)} into {folder}, about 1.3 GB with a CPU build of torch", file=sys.stderr
    )
    if not python.exists():
        venv.create(folder, with_pip=True)
    index = os.environ.get("TORCH_INDEX")
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--extra-index-url", index] if index else []
    if subprocess.run([*command, "-c", str(CONSTRAINTS), *PACKAGES], stdout=sys.stderr).returncode:
        raise ChildProcessError(
            f"expected pip to install {', '.join(PACKAGES)} into {folder}, it failed: see above; EVERLONG_PEERS may name "
            "another folder, TORCH_INDEX another index of torch wheels"
        )
    stamp.write_text(pins)
    return python


if __name__ == "__main__":
    print(peers_python())
