"""Options that take several values: the option repeated, or values with commas between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token


def split_names(_: object, tokens: Sequence[Token]) -> tuple[str, ...]:
    return tuple(name for token in tokens for name in _parts(token.value))


def split_paths(_: object, tokens: Sequence[Token]) -> tuple[Path, ...]:
    """A path that exists with a comma in its name is one path."""
    words = [token.value for token in tokens]
    return tuple(Path(part) for word in words for part in ([word] if Path(word).exists() else _parts(word)))


def _parts(word: str) -> list[str]:
    """Raises ValueError for a comma with nothing on one side."""
    parts = word.split(",")
    if not all(parts):
        raise ValueError(f"expected values with commas between them, got {word!r}")
    return parts


Names = Annotated[tuple[str, ...], Parameter(converter=split_names, negative=(), show_default=False)]
Paths = Annotated[tuple[Path, ...], Parameter(converter=split_paths, negative=(), show_default=False)]
