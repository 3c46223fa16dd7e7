"""What a task's Dockerfile says about files and settings. Nothing is built: the sandbox runs the host's own tools.

Taken: FROM (as a note), WORKDIR, COPY from the build context into the workdir, ENV, `RUN mkdir -p`. Without effect here and
let through: CMD, EXPOSE, LABEL, MAINTAINER, STOPSIGNAL, USER root. Everything else is refused by its name and line.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from everlong.contracts.records import Record

_HARMLESS = ("CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL")


class Copy(Record, frozen=True, kw_only=True):
    """One thing of the build context that the sandbox starts with."""

    source: str
    """A file or folder of the host."""
    target: str
    """Relative to the workdir, "." for the workdir itself. A folder's content goes there; a file gets that name."""


@dataclass(slots=True)
class Plan:
    """What the file asks for; paths are absolute inside the image until the workdir is known."""

    image: str = ""
    workdir: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[Path, str]] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def read_dockerfile(path: Path) -> Plan:
    """Follow the file's instructions. What cannot be honoured is listed in `refused`, never skipped.

    Raises ValueError where an instruction is malformed or copies what is not there.
    """
    plan = Plan()
    for number, text in _instructions(path.read_text(encoding="utf-8")):
        name, _, rest = text.partition(" ")
        try:
            _apply(plan, name.upper(), rest.strip(), path.parent)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        except _Refused as refused:
            plan.refused.append(f"Dockerfile line {number}: {refused}")
    return plan


class _Refused(Exception):
    """An instruction that this reader cannot honour."""


def _instructions(text: str) -> list[tuple[int, str]]:
    """Line numbers and instructions, with continued lines joined and comments left out."""
    found: list[tuple[int, str]] = []
    start, parts = 0, []
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not line.strip():
            continue
        start = start if parts else number
        parts.append(line.strip().removesuffix("\\").strip())
        if not line.rstrip().endswith("\\"):
            found.append((start, " ".join(parts)))
            parts = []
    return found + ([(start, " ".join(parts))] if parts else [])


def _apply(plan: Plan, name: str, rest: str, context: Path) -> None:
    if "$" in rest and name in ("FROM", "WORKDIR", "COPY", "ENV"):
        raise _Refused(f"{name} with a variable ({rest})")
    if name == "FROM" and not plan.image:
        plan.image = rest
    elif name == "WORKDIR":
        plan.workdir = _absolute(plan, rest)
    elif name == "ENV":
        plan.env.update(_assignments(rest))
    elif name == "COPY":
        plan.copies += _copies(plan, rest, context)
    elif name == "RUN" and re.fullmatch(r"mkdir( -p)?( [\w./-]+)+", rest):
        plan.folders += [_absolute(plan, folder) for folder in rest.split()[1:] if folder != "-p"]
    elif name not in _HARMLESS and not (name == "USER" and rest in ("root", "0")):
        raise _Refused("a second FROM" if name == "FROM" else f"{name} {rest}"[:80].rstrip())


def _absolute(plan: Plan, path: str) -> str:
    return posixpath.normpath(posixpath.join(plan.workdir or "/", path))


def _assignments(rest: str) -> dict[str, str]:
    words = shlex.split(rest)
    if words and "=" not in words[0]:
        name, _, value = rest.partition(" ")
        if not value:
            raise ValueError(f"ENV needs NAME=value, got {rest!r}")
        return {name: value.strip()}
    pairs = [word.partition("=") for word in words]
    if not pairs or not all(name and equals for name, equals, _ in pairs):
        raise ValueError(f"ENV needs NAME=value, got {rest!r}")
    return {name: value for name, _, value in pairs}


def _copies(plan: Plan, rest: str, context: Path) -> list[tuple[Path, str]]:
    words = [str(word) for word in json.loads(rest)] if rest.startswith("[") else rest.split()
    if any(word.startswith(("--", "<<")) or set("*?[") & set(word) for word in words):
        raise _Refused(f"COPY with options, wildcards or a here-document ({rest})")
    if len(words) < 2:
        raise ValueError(f"COPY needs a source and a target, got {rest!r}")
    *sources, target = words
    into_folder = target.endswith(("/", "/.")) or target == "."
    if len(sources) > 1 and not into_folder:
        raise ValueError(f"COPY of several sources needs a target that ends with /, got {target!r}")
    found = []
    for source in sources:
        path = (context / source.lstrip("/")).resolve()
        if not path.is_relative_to(context.resolve()):
            raise ValueError(f"COPY {source} leads out of {context}")
        if not path.exists():
            raise ValueError(f"COPY {source}: expected {path}, found {_listing(context)}")
        place = _absolute(plan, target)
        takes_name = path.is_file() and (into_folder or place == plan.workdir)
        found.append((path, posixpath.join(place, path.name) if takes_name else place))
    return found


def _listing(folder: Path) -> str:
    return ", ".join(sorted(entry.name for entry in folder.iterdir())) or "nothing"
