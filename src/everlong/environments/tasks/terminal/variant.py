"""One concrete task of a kind, and the conditions its verifier checks."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass

from everlong.environments.tasks.terminal.draw import Draw


@dataclass(frozen=True, slots=True)
class Variant:
    instruction: str
    files: dict[str, bytes]
    """What the workdir holds at the start."""
    commands: tuple[str, ...]
    """The oracle's, one per turn; each runs in the workdir."""
    checks: tuple[str, ...]
    """Shell conditions that all hold when the work is done; see `same`, `file_is`, `gone`."""


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    make: Callable[[Draw], Variant]
    level: int
    """1 is the easiest: one short command whose every word stands in the instruction."""
    held_out: bool = False
    """Never in the train split."""


def text(lines: list[str]) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def file_is(path: str, content: str) -> str:
    """The file is plain and holds exactly this text; blank lines at its end do not count."""
    return f"holds {shlex.quote(path)} {shlex.quote(content.rstrip(chr(10)))}"


def gone(path: str) -> str:
    return f"[ ! -e {shlex.quote(path)} ]"


def untouched(files: dict[str, bytes], *paths: str) -> list[str]:
    """Each of these files still holds what it held at the start."""
    return [file_is(path, files[path].decode()) for path in paths]


VERIFIER = """\
#!/bin/bash
# Runs in the workdir. Writes 1 when every condition holds, else 0; nothing is written before all were checked.
# EVERLONG_ROOT is where / lies when there is no isolation; it is not set anywhere else.
holds() {  # a plain file, not a link, no larger than 64 KB, that holds exactly this text
    [ -f "$1" ] && [ ! -L "$1" ] && [ "$(wc -c < "$1")" -le 65536 ] && [ "$(tr '\\0' '?' < "$1")" = "$2" ]
}
check() {
    [ -z "$(find . -type l | head -n 1)" ] || return 1
%s
}
if check; then reward=1; else reward=0; fi
echo "$reward" > "$EVERLONG_ROOT/logs/verifier/reward.txt"
"""


def render_verifier(variant: Variant) -> str:
    return VERIFIER % "\n".join(f"    {check} || return 1" for check in variant.checks)


def render_solution(variant: Variant) -> str:
    return "\n".join(("#!/bin/bash", *variant.commands)) + "\n"
