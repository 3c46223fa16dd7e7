"""Exact coding of what changed in a tensor, near its entropy conditional on the old exponents, and applied fast.

Values are coded in groups of like old exponents (`groups`): positions of the changed ones as ascending numbers among the
group's, then a sign for each, then which of them moved by more than one unit in the last place, and by how much. Where nearly
every value of a group changed, each has a step. Pieces of a tensor stand for themselves, which bounds the memory. Any bit
pattern survives: what moved too far is sent whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from everlong.weights.ascending import Ascending, decode_ascending, encode_ascending
from everlong.weights.groups import EXPONENTS, SIZES, WHOLE, Coding, Group, choose_groups
from everlong.weights.places import distances, moved
from everlong.weights.symbols import compress_symbols, decompress_symbols
from everlong.weights.tensors import RawTensor

# N values of a piece, M members of a group, C changed ones

PIECE = 1 << 22
"""Values that are coded at once."""

CHUNK = 1 << 16
"""Values that are looked at once: they and what is computed of them fit a core's own cache."""

SAMPLED = 1 << 16
"""So many values tell how exponents are spread."""

FEW = 256
"""Fewer changes are coded in one group."""

FAR = 255
"""An excess that stands for the new value's full bits."""

FAR_STEP = -128
"""The same among steps for every value."""


class ChangedPart(msgspec.Struct, frozen=True, array_like=True, tag="c", forbid_unknown_fields=True):
    """The changes of a group."""

    bound: int
    """Old exponents from here on, without those of the groups before; 0 for the last group."""
    alone: bool
    """Positions count the group's values; otherwise inner groups' too."""
    positions: Ascending
    signs: bytes
    """A bit for each change: 1 towards minus infinity."""
    larger: Ascending
    """Which of the changes are of 2 ulp and more."""
    excess: bytes
    """zstd: for each of these the ulp over 2, a byte; 255 where the value is in `far`."""
    far: bytes


class EveryPart(msgspec.Struct, frozen=True, array_like=True, tag="e", forbid_unknown_fields=True):
    """A step for each value of a group."""

    bound: int
    steps: bytes
    """zstd: int8; -128 where the value is in `far`."""
    far: bytes


Part = ChangedPart | EveryPart
_DECODER = msgspec.msgpack.Decoder(list[list[Part]])


def encode_sparse(old: RawTensor, new: RawTensor) -> bytes:
    """What turns `old` into `new`, both of the same dtype and shape."""
    assert old.same_layout(new)
    before, after = old.flat(), new.flat()
    return msgspec.msgpack.encode(
        [_encode_piece(before[at : at + PIECE], after[at : at + PIECE]) for at in range(0, before.size, PIECE)]
    )


def apply_sparse(old: RawTensor, payload: bytes | memoryview) -> RawTensor:
    """A new tensor: `old` with the payload's changes. `old` is not touched.

    Raises ValueError for a payload that is damaged or does not fit; only the checksum tells whether `old` was the base.
    """
    try:
        pieces = _DECODER.decode(payload)
    except msgspec.DecodeError as error:
        raise ValueError(f"payload of {len(payload)} bytes is no delta: {error}") from error
    before = old.flat()
    if len(pieces) != -(-before.size // PIECE):
        raise ValueError(f"a tensor of {before.size} values has {-(-before.size // PIECE)} pieces, got {len(pieces)}")
    after = before.copy()
    for at, parts in zip(range(0, before.size, PIECE), pieces, strict=True):
        _apply_piece(before[at : at + PIECE], parts, after[at : at + PIECE])
    return RawTensor(old.dtype, old.shape, after.reshape(old.shape))


# Encoding ------------------------------------------------------------------------------------------------------------


def _encode_piece(before_N: np.ndarray, after_N: np.ndarray) -> list[Part]:
    differs_N = before_N != after_N
    changed_C = np.flatnonzero(differs_N)
    if not changed_C.size:
        return []
    old_C, new_C = before_N[changed_C], after_N[changed_C]
    exponents_C, steps_C = _exponents(old_C), distances(old_C, new_C)
    groups = WHOLE if changed_C.size < FEW else choose_groups(*_statistics(before_N, exponents_C, steps_C))
    parts, above = [], EXPONENTS
    for group, members_M in zip(groups, _members(before_N, groups), strict=True):
        own_C = np.flatnonzero((exponents_C >= group.bound) & (exponents_C < above))
        if members_M is None:
            ranks = changed_C[own_C]
        else:
            ranks = np.flatnonzero(differs_N[members_M])
            if len(ranks) != len(own_C):  # inner groups are among the members
                ranks = ranks[_exponents(before_N[members_M[ranks]]) >= group.bound]
        if group.coding is Coding.EVERY:
            num_members = before_N.size if members_M is None else members_M.size
            parts.append(_encode_every(group.bound, num_members, ranks, steps_C[own_C], new_C[own_C]))
        else:
            parts.append(_encode_changed(group, ranks, steps_C[own_C], new_C[own_C]))
        above = group.bound
    return parts


def _statistics(before_N: np.ndarray, exponents_C: np.ndarray, steps_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As `choose_groups` takes them."""
    stride = max(1, before_N.size // SAMPLED)
    num_values_X = np.bincount(_exponents(before_N[::stride]), minlength=EXPONENTS) * stride
    sizes_C = np.minimum(np.abs(steps_C), SIZES).astype(np.intp) - 1
    sizes_XS = np.bincount(exponents_C.astype(np.intp) * SIZES + sizes_C, minlength=EXPONENTS * SIZES)
    return num_values_X, sizes_XS.reshape(EXPONENTS, SIZES)


def _encode_changed(group: Group, ranks_C: np.ndarray, steps_C: np.ndarray, new_C: np.ndarray) -> ChangedPart:
    sizes_C = np.abs(steps_C)
    larger = np.flatnonzero(sizes_C > 1)
    excess = np.minimum(sizes_C[larger] - 2, FAR).astype(np.uint8)
    return ChangedPart(
        bound=group.bound,
        alone=group.coding is Coding.ALONE,
        positions=encode_ascending(ranks_C),
        signs=np.packbits(steps_C < 0).tobytes(),
        larger=encode_ascending(larger),
        excess=compress_symbols(excess.tobytes()) if excess.size else b"",
        far=new_C[larger[excess == FAR]].tobytes(),
    )


def _encode_every(bound: int, num_members: int, ranks_C: np.ndarray, steps_C: np.ndarray, new_C: np.ndarray) -> EveryPart:
    far_C = np.abs(steps_C) > 127
    steps_M = np.zeros(num_members, np.int8)
    steps_M[ranks_C] = np.where(far_C, FAR_STEP, steps_C)
    return EveryPart(bound, compress_symbols(steps_M.tobytes()), new_C[far_C].tobytes())


# Applying ------------------------------------------------------------------------------------------------------------


def _apply_piece(before_N: np.ndarray, parts: list[Part], after_N: np.ndarray) -> None:
    """Write the changes into `after_N`, a copy of `before_N`. Nothing is written where ValueError is raised."""
    if not parts:
        return
    groups = [Group(part.bound, Coding.EVERY if isinstance(part, EveryPart) else _coding(part)) for part in parts]
    bounds = [EXPONENTS, *(group.bound for group in groups)]
    if bounds[-1] != 0 or any(inner >= outer for outer, inner in zip(bounds, bounds[1:], strict=False)):
        raise ValueError(f"expected groups with descending bounds down to 0, got {bounds[1:]}")
    changes = [
        _decode_changed(part, members_M, before_N) if isinstance(part, ChangedPart) else _decode_every(part, members_M, before_N)
        for part, members_M in zip(parts, _members(before_N, groups), strict=True)
    ]
    changed_C = np.concatenate([change.positions for change in changes])
    steps_C = np.concatenate([change.steps for change in changes])
    after_N[changed_C] = moved(before_N[changed_C], steps_C)
    for change in changes:
        if change.far.size:
            after_N[change.positions[change.far]] = change.far_values


@dataclass(frozen=True, slots=True)
class Changes:
    positions: np.ndarray
    """In the piece, int64."""
    steps: np.ndarray
    """int16 or int8; anything where the value is far."""
    far: np.ndarray
    """Indices of those whose new values are given whole."""
    far_values: np.ndarray


def _coding(part: ChangedPart) -> Coding:
    return Coding.ALONE if part.alone else Coding.NESTED


def _decode_changed(part: ChangedPart, members_M: np.ndarray | None, before_N: np.ndarray) -> Changes:
    ranks_C = decode_ascending(part.positions, before_N.size if members_M is None else members_M.size)
    count = ranks_C.size
    if len(part.signs) != (count + 7) // 8:
        raise ValueError(f"{count} signs need {(count + 7) // 8} bytes, got {len(part.signs)}")
    larger = decode_ascending(part.larger, count)
    excess = np.frombuffer(decompress_symbols(part.excess, larger.size), np.uint8)
    steps_C = 1 - 2 * np.unpackbits(np.frombuffer(part.signs, np.uint8), count=count).view(np.int8)
    if larger.size:
        steps_C = steps_C.astype(np.int16)
        steps_C[larger] *= excess.astype(np.int16) + 2
    far = larger[excess == FAR]
    return Changes(
        ranks_C if members_M is None else members_M[ranks_C], steps_C, far, _far_values(part.far, before_N.dtype, far.size)
    )


def _decode_every(part: EveryPart, members_M: np.ndarray | None, before_N: np.ndarray) -> Changes:
    members_M = np.arange(before_N.size) if members_M is None else members_M
    steps_M = np.frombuffer(decompress_symbols(part.steps, members_M.size), np.int8)
    far = np.flatnonzero(steps_M == FAR_STEP)
    return Changes(members_M, steps_M, far, _far_values(part.far, before_N.dtype, far.size))


def _far_values(raw: bytes, dtype: np.dtype, count: int) -> np.ndarray:
    if len(raw) != count * dtype.itemsize:
        raise ValueError(f"{count} far values need {count * dtype.itemsize} bytes, got {len(raw)}")
    return np.frombuffer(raw, dtype)


# Both ----------------------------------------------------------------------------------------------------------------


def _members(before_N: np.ndarray, groups: Sequence[Group]) -> Iterator[np.ndarray | None]:
    """For each group the positions, ascending, among which its changes are counted; None stands for all."""
    inner: np.ndarray | None = None
    for group in groups:
        outer = inner
        if not group.bound:
            yield outer
        elif outer is None:
            inner, above = _split(before_N, group.bound, with_above=group.coding is not Coding.NESTED)
            yield above
        else:
            below_M = _is_below(before_N[outer], group.bound)
            inner = outer[below_M]
            yield outer if group.coding is Coding.NESTED else outer[~below_M]


def _split(before_N: np.ndarray, bound: int, *, with_above: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Positions of the values with an exponent below the bound and, where asked for, of the others."""
    below, above = [], []
    for start in range(0, before_N.size, CHUNK):
        is_below = _is_below(before_N[start : start + CHUNK], bound)
        below.append(np.flatnonzero(is_below) + start)
        if with_above:
            above.append(np.flatnonzero(~is_below) + start)
    return np.concatenate(below), np.concatenate(above) if with_above else None


def _is_below(bits_N: np.ndarray, bound: int) -> np.ndarray:
    return (bits_N << 1) < bits_N.dtype.type(bound << (8 * bits_N.itemsize - 8))  # without the sign, the exponent leads


def _exponents(bits_N: np.ndarray) -> np.ndarray:
    """uint8."""
    return ((bits_N << 1) >> (8 * bits_N.itemsize - 8)).astype(np.uint8)
