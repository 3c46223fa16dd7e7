"""Evidence files: what a campaign or a study found, at which commit, by which command, and which files it is about."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parents[1]


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
