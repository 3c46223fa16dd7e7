"""What must be in the environment before torch is loaded. No torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def required_environment(numerics: str) -> dict[str, str]:
    """Intel's MKL takes its summation order from the shape unless told before it is loaded.

    Where it changes nothing it does no harm: whether the mode holds is for `numerics.self_test` to say.
    """
    return {"MKL_CBWR": "AVX512,STRICT"} if numerics == "aligned" else {}


def prepare_process(numerics: str, cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Put it into this process's environment, for a worker that lives in it.

    Raises ValueError where that comes too late: torch is loaded, the processor is Intel's and the variable was not set.
    """
    missing = {name: value for name, value in required_environment(numerics).items() if os.environ.get(name) != value}
    if not missing:
        return
    if "torch" in sys.modules and _is_intel(cpuinfo):
        wanted = " ".join(f"{name}={value}" for name, value in missing.items())
        raise ValueError(
            f"numerics=aligned with worker=inline needs {wanted} in the environment before torch is loaded, and torch is "
            "loaded already: set it before Python starts, or set worker to process"
        )
    os.environ.update(missing)


def _is_intel(cpuinfo: Path) -> bool:
    try:
        return "GenuineIntel" in cpuinfo.read_text(errors="replace")
    except OSError:
        return False
