"""Writes terminal tasks as Harbor folders. The same arguments give the same bytes, whenever and wherever they run."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from blake3 import blake3

from everlong.environments.tasks.harbor import HarborTask
from everlong.environments.tasks.manifest import SCHEMA_VERSION
from everlong.environments.tasks.terminal.draw import Draw
from everlong.environments.tasks.terminal.kinds import KINDS
from everlong.environments.tasks.terminal.variant import Kind, Variant, render_solution, render_verifier
from everlong.environments.tasks.toml_writer import write_toml

_EVAL_ONE_IN = 5
_MAX_DRAWS = 200
"""Per task; only a kind with almost all of its instructions taken needs more than a dozen."""


class Split(StrEnum):
    TRAIN = "train"
    EVAL = "eval"
    """Held-out variants of the trained kinds."""
    HELD_OUT_KINDS = "held-out-kinds"


def make_terminal(
    out: Path, count: int, seed: int = 0, split: Split | str = Split.TRAIN, kinds: Sequence[str] = ()
) -> list[Path]:
    """Write `count` task folders into `out`, the kinds in turn, and return them.

    The hash of an instruction says whether it trains or is held out, so no seed puts one into both splits.
    Raises ValueError for a bad count, split or kind, FileExistsError where `out` holds something already.
    """
    chosen = choose_kinds(Split(split), kinds)
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: name a new folder")
    taken: set[str] = set()
    folders = []
    for number in range(count):
        kind = chosen[number % len(chosen)]
        variant = _fresh_variant(kind, f"{seed}/{kind.name}/{number // len(chosen)}", Split(split), taken)
        folders.append(_write(out, kind, variant, Split(split)))
    return folders


def choose_kinds(split: Split, names: Sequence[str] = ()) -> list[Kind]:
    """The kinds of a split, or those of them that are named. Raises ValueError for a name that the split lacks."""
    known = {kind.name: kind for kind in KINDS if kind.held_out == (split is Split.HELD_OUT_KINDS)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"split {split} has no kind {unknown[0]!r}: it has {', '.join(known)}")
    return [known[name] for name in names] or list(known.values())


def oracle_commands(task: HarborTask) -> list[str]:
    """The oracle's commands in the order of its turns. Raises ValueError for a task whose solution is no such list."""
    if not task.task.id.startswith("terminal/") or task.solution is None:
        raise ValueError(f"task {task.id} has no oracle of one command per line: only generated terminal tasks do")
    lines = (Path(task.solution) / "solve.sh").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _fresh_variant(kind: Kind, name: str, split: Split, taken: set[str]) -> Variant:
    for attempt in range(_MAX_DRAWS):
        variant = kind.make(Draw.named(f"everlong/{name}/{attempt}"))
        if variant.instruction not in taken and _belongs(variant, split):
            taken.add(variant.instruction)
            return variant
    raise ValueError(f"kind {kind.name} has no more instructions of the {split} split: ask for fewer tasks")


def _belongs(variant: Variant, split: Split) -> bool:
    is_eval = _number(variant.instruction.encode()) % _EVAL_ONE_IN == 0
    return split is Split.HELD_OUT_KINDS or is_eval == (split is Split.EVAL)


def _number(data: bytes) -> int:
    return int.from_bytes(blake3(data).digest(6), "big")


def _write(out: Path, kind: Kind, variant: Variant, split: Split) -> Path:
    parts = (
        variant.instruction.encode(),
        *(part for item in variant.files.items() for part in (item[0].encode(), item[1])),
    )
    number = _number(b"\0".join(parts)) % 10**8
    folder = out / f"{kind.name}-{number:08d}"
    dockerfile = ["FROM debian:12-slim", "WORKDIR /app"]
    if variant.files:
        dockerfile.append("COPY files/ /app/")
    contents = {
        "instruction.md": variant.instruction + "\n",
        "task.toml": write_toml(_manifest(kind, number, split)),
        "environment/Dockerfile": "\n".join(dockerfile) + "\n",
        "tests/test.sh": render_verifier(variant),
        "solution/solve.sh": render_solution(variant),
    }
    for name, content in contents.items():
        _write_file(folder / name, content.encode())
    for name, data in variant.files.items():
        _write_file(folder / "environment" / "files" / name, data)
    return folder


def _manifest(kind: Kind, number: int, split: Split) -> dict[str, object]:
    return {
        "schema_version": SCHEMA_VERSION,
        "task": {"name": f"terminal/{kind.name}-{number:08d}"},
        "metadata": {
            "id": f"terminal/{kind.name}/{number}",
            "kind": kind.name,
            "level": kind.level,
            "split": str(split),
        },
        "agent": {"timeout_sec": 60.0},
        "verifier": {"timeout_sec": 20.0},
        "environment": {"network_mode": "no-network", "memory_mb": 256, "storage_mb": 256},
    }


def _write_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o644)
