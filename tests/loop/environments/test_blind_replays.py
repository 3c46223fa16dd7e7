"""An agent that replays what solved another variant, without reading anything, must not be paid for it."""

import os
import subprocess
from itertools import permutations
from pathlib import Path

import pytest

from everlong.environments.tasks.terminal.draw import Draw
from everlong.environments.tasks.terminal.kinds import KINDS
from everlong.environments.tasks.terminal.variant import Kind, Variant, render_verifier

VARIANTS = 8
MOST_PAID = 0.05


def score(variant: Variant, commands: tuple[str, ...], folder: Path) -> float:
    workdir, verdict = folder / "app", folder / "logs" / "verifier"
    for path in (workdir, verdict):
        path.mkdir(parents=True)
    for name, data in variant.files.items():
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_bytes(data)
    env = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": str(verdict), "EVERLONG_ROOT": str(folder)}
    for command in (*commands, render_verifier(variant)):
        subprocess.run(["bash", "-c", command], cwd=workdir, env=env, stdin=subprocess.DEVNULL, capture_output=True)
    return float((verdict / "reward.txt").read_text())


def with_names_of(variant: Variant, other: Variant) -> tuple[str, ...]:
    """The other variant's commands with this one's words where the instructions differ: all a blind agent can know."""
    words = dict(zip(_words(other.instruction), _words(variant.instruction), strict=True))
    return tuple("".join(words.get(part, part) for part in _split(command)) for command in other.commands)


def _words(text: str) -> list[str]:
    return [part for part in _split(text) if part.isalnum()]


def _split(text: str) -> list[str]:
    parts = [""]
    for char in text:
        if parts[-1] and char.isalnum() and parts[-1][-1].isalnum():
            parts[-1] += char
        else:
            parts.append(char)
    return parts


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_replaying_another_variants_oracle_is_not_paid(kind: Kind, tmp_path: Path):
    variants = [kind.make(Draw.named(f"blind/{kind.name}/{number}")) for number in range(VARIANTS)]
    pairs = list(permutations(variants, 2))
    scores = [score(mine, other.commands, tmp_path / str(number)) for number, (mine, other) in enumerate(pairs)]
    print(f"{kind.name}: {sum(scores):g} of {len(pairs)} blind replays paid")
    assert len(pairs) >= 20
    assert sum(scores) / len(pairs) <= MOST_PAID


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.level == 3], ids=lambda kind: kind.name)
def test_where_reading_is_needed_the_right_names_alone_are_not_paid(kind: Kind, tmp_path: Path):
    variants = [kind.make(Draw.named(f"names/{kind.name}/{number}")) for number in range(VARIANTS)]
    pairs = list(permutations(variants, 2))
    scores = [score(mine, with_names_of(mine, other), tmp_path / str(n)) for n, (mine, other) in enumerate(pairs)]
    print(f"{kind.name}: {sum(scores):g} of {len(pairs)} blind replays with the right names paid")
    assert sum(scores) / len(pairs) <= MOST_PAID


def test_the_right_names_are_enough_where_nothing_must_be_read(tmp_path: Path):
    """The transplant itself works: for a one-command kind it gives the oracle's own command."""
    kind = next(kind for kind in KINDS if kind.name == "sort-unique")
    mine, other = (kind.make(Draw.named(f"names/{kind.name}/{number}")) for number in range(2))
    assert with_names_of(mine, other) == mine.commands
    assert score(mine, with_names_of(mine, other), tmp_path) == 1.0
