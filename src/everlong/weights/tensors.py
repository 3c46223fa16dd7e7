"""Weights as bit patterns: what is compared, sent and verified are integers, never floats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import xxhash

WeightDtype = Literal["float32", "bfloat16"]

BITS: dict[str, np.dtype] = {"float32": np.dtype("<u4"), "bfloat16": np.dtype("<u2")}
"""The unsigned integer that holds one value's bits."""

EXPONENT: dict[str, int] = {"float32": 0x7F800000, "bfloat16": 0x7F80}
"""The bits of plus infinity; a value whose magnitude bits exceed it is a NaN."""


@dataclass(frozen=True, slots=True, eq=False)
class RawTensor:
    """One tensor's bits. They are never written again: hand over a copy of parameters that go on training.

    Example: RawTensor("bfloat16", (3,), np.array([0x3F80, 0xC000, 0x3F00], np.uint16)) is [1, -2, 0.5].
    """

    dtype: WeightDtype
    shape: tuple[int, ...]
    bits: np.ndarray
    """uint32 for float32, uint16 for bfloat16; of `shape`."""

    def __post_init__(self) -> None:
        if self.dtype not in BITS:
            raise ValueError(f"weights travel as float32 or bfloat16, got {self.dtype}: convert them first")
        if self.bits.dtype != BITS[self.dtype] or self.bits.shape != tuple(self.shape):
            raise ValueError(
                f"{self.dtype} bits must be {BITS[self.dtype]} of shape {tuple(self.shape)}, "
                f"got {self.bits.dtype} of shape {self.bits.shape}"
            )

    @property
    def size(self) -> int:
        return self.bits.size

    def flat(self) -> np.ndarray:
        """The bits as one contiguous row; not a copy where they are contiguous already."""
        return np.ascontiguousarray(self.bits).reshape(-1)

    def same_layout(self, other: RawTensor) -> bool:
        return self.dtype == other.dtype and tuple(self.shape) == tuple(other.shape)

    def has_nan(self) -> bool:
        magnitude = EXPONENT[self.dtype] | (EXPONENT[self.dtype] & -EXPONENT[self.dtype]) - 1
        return bool(np.any((self.bits & magnitude) > EXPONENT[self.dtype]))

    def checksum(self) -> str:
        """xxh3-128 of dtype, shape and bytes."""
        hasher = xxhash.xxh3_128(self._header())
        hasher.update(self.flat().view(np.uint8).data)
        return hasher.hexdigest()

    def _header(self) -> bytes:
        return f"{self.dtype}{list(self.shape)}".encode()


@dataclass(frozen=True, slots=True, eq=False)
class WeightSet:
    """Every tensor of one policy version, by name."""

    version: int
    tensors: Mapping[str, RawTensor]
    """What changes from version to version: all there is, or adapters."""
    frozen: Mapping[str, RawTensor] = field(default_factory=dict)
    """What the adapters stand on: the same in every version, kept once in the store."""

    def __post_init__(self) -> None:
        if isinstance(self.version, bool) or not isinstance(self.version, int) or self.version < 0:
            raise ValueError(f"a policy version is an integer from 0, got {self.version!r}")

    @property
    def num_values(self) -> int:
        """Of what changes."""
        return sum(tensor.size for tensor in self.tensors.values())


def fingerprint(weights: WeightSet | Mapping[str, RawTensor]) -> str:
    """xxh3-128 over names, dtypes, shapes and bytes in the order of the names: equal exactly when every bit is equal.

    Of a set it covers all that a token is computed with, what is frozen included.
    """
    tensors = {**weights.frozen, **weights.tensors} if isinstance(weights, WeightSet) else weights
    return fingerprint_of(checksums_of(tensors))


def checksums_of(tensors: Mapping[str, RawTensor]) -> dict[str, str]:
    return {name: tensor.checksum() for name, tensor in tensors.items()}


def fingerprint_of(checksums: Mapping[str, str]) -> str:
    """The fingerprint of a set whose tensors have these checksums."""
    hasher = xxhash.xxh3_128()
    for name in sorted(checksums):
        hasher.update(f"{len(name)}:{name}={checksums[name]};".encode())
    return hasher.hexdigest()
