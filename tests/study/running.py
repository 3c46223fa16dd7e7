"""Runs of a study, each by the command line and gone on with where it stopped."""

from __future__ import annotations

import subprocess
import sys

from tests.evidence import ROOT

from everlong.cli.config import RunConfig
from everlong.cli.run_folder import RunFolder
from everlong.cli.toml import write_config


def everlong(*words: str) -> None:
    """Raises CalledProcessError where the command fails."""
    command = (sys.executable, "-c", "from everlong.cli.main import main; main()", *words)
    subprocess.run(command, check=True, cwd=ROOT)


def run_or_go_on(command: str, folder: RunFolder, config: RunConfig) -> RunFolder:
    """Start the run, or go on with what is there of it. Raises CalledProcessError where it fails."""
    if folder.ledger.exists():
        words = ["resume", str(folder.path)]
    else:
        path = folder.path.with_suffix(".toml")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_config(config.model_copy(update={"output": folder.path}), path)
        words = [command, "@", str(path)]
    print("everlong", *words, flush=True)
    everlong(*words)
    return folder
