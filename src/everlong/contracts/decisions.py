"""What a network decided by choice where it could have chosen otherwise, per token: a column of `TokenColumns` keyed by name.

A decision is a few small numbers per place in the network, such as the experts that a layer's router sent a token to. Numbers
that were computed for what was chosen (the weights of those experts) may stand beside it under a name of their own.

The row at a token is of the pass that predicted the token: what the network decided for the token before it on its path. So
it stands beside the logprob that it led to, each branch says what its own pass decided where it left another, and only the
first token of a root has none. The last token of a path went through no network.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

# T tokens, P places in the network, W numbers at each

ABSENT: dict[str, float | int] = {"uint8": 0xFF, "uint16": 0xFFFF, "float32": np.nan}
"""What fills the row of a token of which nothing is recorded, by type; no choice has that number."""


class DecisionShape(NamedTuple):
    """Of one name's rows, as a network makes them."""

    places: int
    width: int
    num_choices: int | None
    """Choices are numbered from 0; None for numbers that were computed for a choice, in float32."""

    @property
    def dtype(self) -> str:
        return "float32" if self.num_choices is None else "uint8" if self.num_choices <= ABSENT["uint8"] else "uint16"


class Decisions(msgspec.Struct, frozen=True, kw_only=True):
    """Example: Decisions(num_tokens=2, rows={"experts": np.uint8([[[3, 0], [1, 2]], [[255, 255], [255, 255]]])})"""

    num_tokens: int
    rows: dict[str, np.ndarray] = {}
    """By name [T, P, W], of a type in `ABSENT`. A name that is not there was recorded of no token."""

    def __len__(self) -> int:
        return self.num_tokens

    def check(self) -> None:
        """Raises ValueError for rows that are out of step with the tokens, or of a type that does not say what is absent."""
        for name, rows in self.rows.items():
            if rows.ndim != 3 or len(rows) != self.num_tokens:
                raise ValueError(
                    f"{name} has rows of shape {list(rows.shape)} for {self.num_tokens} tokens: expected one row per token, "
                    "of [places, width]: refuse the record"
                )
            if rows.dtype.name not in ABSENT:
                raise ValueError(f"{name} is {rows.dtype}: expected one of {', '.join(ABSENT)}")

    def known(self, name: str) -> np.ndarray:
        """bool[T]: whose row says anything."""
        rows = self.rows.get(name)
        if rows is None:
            return np.zeros(self.num_tokens, bool)
        return np.asarray((~_is_absent(rows)).any((1, 2)))

    def only(self, names: Collection[str]) -> Decisions:
        return Decisions(num_tokens=self.num_tokens, rows={n: rows for n, rows in self.rows.items() if n in names})

    def slice(self, start: int, stop: int) -> Decisions:
        """Of tokens `start` to `stop`, both within the record."""
        return Decisions(num_tokens=stop - start, rows={name: rows[start:stop] for name, rows in self.rows.items()})

    @staticmethod
    def join(parts: Sequence[Decisions]) -> Decisions:
        """A name that some parts lack is absent there. Raises ValueError where two parts have it in different shapes."""
        names = {name: rows for part in parts for name, rows in part.rows.items()}
        return Decisions(
            num_tokens=sum(map(len, parts)),
            rows={
                name: np.concatenate([_rows_like(part, name, like) for part in parts]) for name, like in names.items()
            },
        )

    @property
    def size_bytes(self) -> int:
        return sum(rows.nbytes for rows in self.rows.values())


def absent_rows(num_tokens: int, shape: DecisionShape) -> np.ndarray:
    return np.full((num_tokens, shape.places, shape.width), ABSENT[shape.dtype], shape.dtype)


def _is_absent(rows: np.ndarray) -> np.ndarray:
    return np.isnan(rows) if rows.dtype.kind == "f" else rows == ABSENT[rows.dtype.name]


def _rows_like(part: Decisions, name: str, like: np.ndarray) -> np.ndarray:
    rows = part.rows.get(name)
    if rows is None:
        return np.full((len(part), *like.shape[1:]), ABSENT[like.dtype.name], like.dtype)
    if rows.shape[1:] != like.shape[1:] or rows.dtype != like.dtype:
        raise ValueError(
            f"{name} is {rows.dtype}{list(rows.shape[1:])} per token here and {like.dtype}{list(like.shape[1:])} there: they were "
            "recorded of two different models"
        )
    return rows
