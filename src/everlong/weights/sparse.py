"""Exact coding of what changed in a tensor, near its entropy conditional on the old exponents, and applied fast.

Values are coded in groups of like old exponents (`groups`): positions of the changed ones as ascending numbers among the
group's, then a sign for each, then which of them moved by more than one unit in the last place, and by how much. Where nearly
every value of a group changed, each has a step. Pieces of a tensor stand for themselves, which bounds the memory. At last zstd
takes out what changes that lie close together leave. Any bit pattern survives: what moved too far is sent whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

import msgspec
import numpy as np

from everlong.weights.ascending import Ascending, decode_ascending, encode_ascending
from everlong.weights.groups import EXPONENTS, SIZES, WHOLE, Coding, Group, choose_groups
from everlong.weights.members import AllValues, Bitmap, Listed, Members, words_of, words_without
from everlong.weights.places import distances, moved
from everlong.weights.symbols import decode_symbols, encode_symbols
from everlong.weights.tensors import RawTensor
from everlong.weights.zstd import compress, decompress, is_compressed

# N values of a piece, M members of a group, C changed ones, W words of 64 values

PIECE = 1 << 22
"""Values that are coded at once."""

CHUNK = 1 << 19
"""Values that are compared at once: few enough for the cache, enough for the calls not to count, and whole words of 64."""

SAMPLED = 1 << 14
"""So many values tell how exponents are spread."""

FEW = 256
"""Fewer changes are coded in one group."""

FAR = 255
"""A symbol that stands for the new value's full bits."""


class Larger(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Changes of 2 ulp and more."""

    which: Ascending
    """Among the group's changes."""
    excess: bytes
    """Symbols: the ulp over 2; 255 where the value is in `far`."""
    far: bytes
    """New values, whole."""


class ChangedPart(msgspec.Struct, frozen=True, array_like=True, tag=0, forbid_unknown_fields=True):
    """The changes of a group."""

    bound: int
    """Old exponents from here on, without those of the groups before; 0 for the last group."""
    among_own: bool
    """Positions count the group's own values; otherwise all."""
    positions: Ascending
    signs: bytes
    """A bit for each change: 1 towards minus infinity."""
    larger: Larger | None
    """None where all are of 1 ulp."""


class EveryPart(msgspec.Struct, frozen=True, array_like=True, tag=1, forbid_unknown_fields=True):
    """A step for each value of a group."""

    bound: int
    steps: bytes
    """Symbols: 0, 1 for an ulp up, 2 for one down, 3 for two up, …; 255 where the value is in `far`."""
    far: bytes


Part = ChangedPart | EveryPart

MOST_OVERHEAD = 1 << 20
"""Bytes over two for each value and its new bits that no delta reaches."""

_DECODER = msgspec.msgpack.Decoder(list[list[Part]])


def encode_sparse(old: RawTensor, new: RawTensor) -> bytes:
    """What turns `old` into `new`, both of the same dtype and shape."""
    assert old.same_layout(new)
    before, after = old.flat(), new.flat()
    payload = msgspec.msgpack.encode(
        [_encode_piece(before[at : at + PIECE], after[at : at + PIECE]) for at in range(0, before.size, PIECE)]
    )
    return min(payload, compress(payload, level=1), key=len)


def apply_sparse(old: RawTensor, payload: bytes | memoryview) -> RawTensor:
    """A new tensor: `old` with the payload's changes. `old` is not touched.

    Raises ValueError for a payload that is damaged or does not fit; only the checksum tells whether `old` was the base.
    """
    if is_compressed(payload):
        payload = decompress(payload, MOST_OVERHEAD + old.size * (2 + old.bits.itemsize))
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
    changed_C = Bitmap(words_of(before_N != after_N)).all_positions()
    if not changed_C.size:
        return []
    old_C, new_C = before_N[changed_C], after_N[changed_C]
    exponents_C, steps_C = _exponents(old_C), distances(old_C, new_C)
    groups = WHOLE if changed_C.size < FEW else choose_groups(*_statistics(before_N, exponents_C, steps_C))
    parts, above = [], EXPONENTS
    for group, members in zip(groups, _members(before_N, groups), strict=True):
        own_C = np.flatnonzero((exponents_C >= group.bound) & (exponents_C < above))
        ranks_C = members.ranks(changed_C[own_C])
        if group.coding is Coding.EVERY:
            parts.append(_encode_every(group.bound, members.count, ranks_C, steps_C[own_C], new_C[own_C]))
        else:
            parts.append(_encode_changed(group, ranks_C, steps_C[own_C], new_C[own_C]))
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
    far = new_C[larger[excess == FAR]].tobytes()
    return ChangedPart(
        bound=group.bound,
        among_own=group.coding is Coding.AMONG_OWN,
        positions=encode_ascending(ranks_C),
        signs=np.packbits(steps_C < 0).tobytes(),
        larger=Larger(encode_ascending(larger), encode_symbols(excess), far) if larger.size else None,
    )


def _encode_every(
    bound: int, num_members: int, ranks_C: np.ndarray, steps_C: np.ndarray, new_C: np.ndarray
) -> EveryPart:
    symbols_C = np.minimum(np.where(steps_C > 0, 2 * steps_C - 1, -2 * steps_C), FAR).astype(np.uint8)
    symbols_M = np.zeros(num_members, np.uint8)
    symbols_M[ranks_C] = symbols_C
    return EveryPart(bound, encode_symbols(symbols_M), new_C[symbols_C == FAR].tobytes())


# Applying ------------------------------------------------------------------------------------------------------------


def _apply_piece(before_N: np.ndarray, parts: list[Part], after_N: np.ndarray) -> None:
    """Write the changes into `after_N`, a copy of `before_N`. Nothing is written where ValueError is raised."""
    if not parts:
        return
    groups = [Group(part.bound, Coding.EVERY if isinstance(part, EveryPart) else _coding(part)) for part in parts]
    bounds = [EXPONENTS, *(group.bound for group in groups)]
    if bounds[-1] != 0 or any(inner >= outer for outer, inner in pairwise(bounds)):
        raise ValueError(f"expected groups with descending bounds down to 0, got {bounds[1:]}")
    dtype = before_N.dtype
    changes = [
        _decode_changed(part, members, dtype) if isinstance(part, ChangedPart) else _decode_every(part, members, dtype)
        for part, members in zip(parts, _members(before_N, groups), strict=True)
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
    """int8 or int16; anything where the value is far."""
    far: np.ndarray
    """Indices of those whose new values are given whole."""
    far_values: np.ndarray


NONE_FAR = np.empty(0, np.int64)


def _coding(part: ChangedPart) -> Coding:
    return Coding.AMONG_OWN if part.among_own else Coding.AMONG_ALL


def _decode_changed(part: ChangedPart, members: Members, dtype: np.dtype) -> Changes:
    ranks_C = decode_ascending(part.positions, members.count)
    count = ranks_C.size
    if len(part.signs) != (count + 7) // 8:
        raise ValueError(f"{count} signs need {(count + 7) // 8} bytes, got {len(part.signs)}")
    steps_C = 1 - 2 * np.unpackbits(np.frombuffer(part.signs, np.uint8), count=count).view(np.int8)
    positions_C = members.positions(ranks_C)
    if part.larger is None:
        return Changes(positions_C, steps_C, NONE_FAR, np.empty(0, dtype))
    larger = decode_ascending(part.larger.which, count)
    excess = decode_symbols(part.larger.excess, larger.size)
    steps_C = steps_C.astype(np.int16)
    steps_C[larger] *= excess.astype(np.int16) + 2
    far = larger[excess == FAR]
    return Changes(positions_C, steps_C, far, _far_values(part.larger.far, dtype, far.size))


def _decode_every(part: EveryPart, members: Members, dtype: np.dtype) -> Changes:
    symbols_M = decode_symbols(part.steps, members.count)
    far = np.flatnonzero(symbols_M == FAR)
    return Changes(members.all_positions(), _STEPS[symbols_M], far, _far_values(part.far, dtype, far.size))


_STEPS = np.array([(symbol + 1) // 2 if symbol % 2 else -(symbol // 2) for symbol in range(256)], np.int16)
"""By symbol."""


def _far_values(raw: bytes, dtype: np.dtype, count: int) -> np.ndarray:
    if len(raw) != count * dtype.itemsize:
        raise ValueError(f"{count} far values need {count * dtype.itemsize} bytes, got {len(raw)}")
    return np.frombuffer(raw, dtype)


# Both ----------------------------------------------------------------------------------------------------------------


def _members(before_N: np.ndarray, groups: Sequence[Group]) -> Iterator[Members]:
    """For each group the values among which its changes are counted."""
    num_listed = len(list(takewhile(lambda group: group.coding is Coding.EVERY, reversed(groups))))
    compared = groups[: len(groups) - num_listed]
    bounds = [group.bound for group in compared if group.bound]
    below = [None, *(_below(before_N, bounds))]
    for group, outer, inner in zip(compared, below, [*below[1:], None], strict=False):
        yield AllValues(before_N.size) if group.coding is Coding.AMONG_ALL else _between(before_N.size, outer, inner)
    if num_listed:
        positions_M = _between(before_N.size, below[-1], None).all_positions()
        exponents_M, above = _exponents(before_N[positions_M]), EXPONENTS
        for group in groups[len(compared) :]:
            own_M = np.flatnonzero((exponents_M >= group.bound) & (exponents_M < above))
            yield Listed(positions_M[own_M])
            above = group.bound


def _between(num_values: int, outer_W: np.ndarray | None, inner_W: np.ndarray | None) -> Members:
    """What is in `outer_W`, or anything, and not in `inner_W`."""
    if outer_W is None:
        return AllValues(num_values) if inner_W is None else Bitmap(words_without(inner_W, num_values))
    return Bitmap(outer_W if inner_W is None else outer_W & ~inner_W)


def _below(bits_N: np.ndarray, bounds: Sequence[int]) -> list[np.ndarray]:
    """For each bound, as words of bits, which values have an exponent below it."""
    words = [np.empty(-(-bits_N.size // 64), np.uint64) for _ in bounds]
    for start in range(0, bits_N.size if bounds else 0, CHUNK):
        chunk_N = bits_N[start : start + CHUNK]
        unsigned_N = chunk_N + chunk_N  # without the sign, the exponent leads
        for bound, words_W in zip(bounds, words, strict=True):
            is_below = unsigned_N < unsigned_N.dtype.type(bound << (8 * bits_N.itemsize - 8))
            packed_W = words_of(is_below)
            words_W[start // 64 : start // 64 + packed_W.size] = packed_W
    return words


def _exponents(bits_N: np.ndarray) -> np.ndarray:
    """uint8."""
    return ((bits_N << 1) >> (8 * bits_N.itemsize - 8)).astype(np.uint8)
