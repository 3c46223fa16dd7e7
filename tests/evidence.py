"""Evidence files: what a campaign or a study found, at which commit, by which command, and which files it is about."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]


def keep_to_one_code(work: Path, paths: Sequence[str]) -> None:
    """Make the work folder, whose runs may be gone on with, and exit where they were made by other code below `paths`."""
    work.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for path in sorted(file for name in paths for file in _sources(ROOT / name)):
        digest.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    made_by = work / "made-by"
    if not made_by.exists():
        if any(work.iterdir()):
            sys.exit(f"{work} holds runs, and nothing says by which code they were made: remove it, or give --work")
        made_by.write_text(digest.hexdigest())
    elif made_by.read_text() != digest.hexdigest():
        sys.exit(f"{work} holds runs of other code below {', '.join(paths)}: remove it, or give --work")


def _sources(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("*.py"))


def write_evidence(
    path: Path, *, name: str, command: str, seed: int, figures: Mapping[str, object], paths: Sequence[str]
) -> None:
    """It counts until a file below one of `paths` changes."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    evidence = {
        "name": name,
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown",
        "command": command,
        "seed": seed,
        "figures": figures,
        "paths": paths,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(evidence), indent=2) + b"\n")
