"""Between what a network would choose and what it uses: choices pass, are written down, or give way to those on record.

A network asks its `Decide` at every place at which it chooses, and then for the numbers that it computed for the choice. The
record (`contracts/decisions.py`) says which token a row belongs to; here rows are of the tokens that pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

# T tokens, P places in the network, W numbers at each

NOT_CHOSEN = -1
"""In a choice of the record: nothing is known of this token."""


class Decide(Protocol):
    """Settles a decision of one place; `own_TW` is what the network says by itself, int64 for a choice, else a float."""

    def __call__(self, name: str, place: int, own_TW: Tensor) -> Tensor:
        """What is used, of the same shape and type."""
        ...


def as_chosen(name: str, place: int, own_TW: Tensor) -> Tensor:
    """Every network decides for itself."""
    return own_TW


class TokenDecide(Protocol):
    """Settles the decisions of a micro-batch's tokens, however they are shared out over passes and ordered in them."""

    def of(self, tokens_N: Tensor, *, again: bool) -> Decide:
        """For a pass of these tokens, int64 [N]; they pass `again` where a gradient is taken that the first pass left for later."""
        ...


class Recorder:
    """Lets everything pass and keeps it, of one pass."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Tensor]] = defaultdict(list)

    def __call__(self, name: str, place: int, own_TW: Tensor) -> Tensor:
        assert place == len(self._kept[name]), "places are asked in their order"
        self._kept[name].append(own_TW.detach())
        return own_TW

    def rows(self) -> dict[str, Tensor]:
        """By name [T, P, W]."""
        return {name: torch.stack(kept, 1) for name, kept in self._kept.items()}


class TokenRecorder:
    """Lets everything pass and keeps it, token by token."""

    def __init__(self) -> None:
        self._passes: list[tuple[Tensor, Recorder]] = []

    def of(self, tokens_N: Tensor, *, again: bool) -> Decide:
        if again:
            return as_chosen
        self._passes.append((tokens_N, Recorder()))
        return self._passes[-1][1]

    def rows(self) -> dict[str, Tensor]:
        """By name [T, P, W], once all tokens have passed."""
        back = torch.cat([tokens for tokens, _ in self._passes]).argsort()
        found = [recorder.rows() for _, recorder in self._passes]
        return {name: torch.cat([rows[name] for rows in found])[back] for name in found[0]}


class Replay:
    """Puts what is on record in the place of the network's own, token by token; what is not on record stays the network's.

    A choice is replaced, and no gradient flows through it. A number that was computed for it has the recorded value and the
    gradient of the network's own (straight through): g = recorded + (own - sg(own)), which is the recorded value to the bit.
    """

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        """By name [T, P, W]: int64 with `NOT_CHOSEN`, or floats with NaN, where a token has no record."""
        self._rows = rows
        self._known: list[Tensor] = []
        self._alike: list[Tensor] = []

    def of(self, tokens_N: Tensor, *, again: bool) -> Decide:
        part = Replay({name: rows[tokens_N] for name, rows in self._rows.items()})
        if not again:  # what is asked for twice counts once
            part._known, part._alike = self._known, self._alike
        return part

    def __call__(self, name: str, place: int, own_TW: Tensor) -> Tensor:
        rows = self._rows.get(name)
        if rows is None:
            return own_TW
        recorded_TW = rows[:, place]
        if own_TW.is_floating_point():
            kept_TW = recorded_TW.nan_to_num().to(own_TW.dtype) + (own_TW - own_TW.detach())
            return torch.where(recorded_TW.isnan(), own_TW, kept_TW)
        known_TW = recorded_TW != NOT_CHOSEN
        self._known.append(known_TW[:, 0])
        self._alike.append((recorded_TW[:, :, None] == own_TW[:, None, :]).any(-1)[known_TW[:, 0]])
        return torch.where(known_TW, recorded_TW, own_TW)

    def shares(self) -> dict[str, Tensor]:
        """Of all choices asked for: which were replayed; and of those, which the network would have made too, whatever their order."""
        if not self._known:
            return {}
        return {"replayed": torch.cat(self._known), "overlap": torch.cat([alike.flatten() for alike in self._alike])}
