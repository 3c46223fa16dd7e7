"""Tensors sent whole, and what counts as a change: bits, never numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from everlong.weights.choice import count_changed
from everlong.weights.sparse import apply_sparse, encode_sparse
from everlong.weights.tensors import BITS, RawTensor
from everlong.weights.whole import decode_full, encode_full

SPECIAL = {
    "bfloat16": [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F7F, 0xFF7F],
    "float32": [0x0, 0x80000000, 0x1, 0x80000001, 0x7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F7FFFFF],
}


def tensor(dtype: str, values: np.ndarray | list[int]) -> RawTensor:
    bits = np.asarray(values, BITS[dtype])
    return RawTensor(dtype, bits.shape, bits)  # type: ignore[arg-type]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[RawTensor, RawTensor]:
    """Two tensors of one layout: the second a mixture of small steps, arbitrary patterns and unchanged values."""
    dtype = draw(st.sampled_from(sorted(BITS)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
    pattern = st.one_of(st.sampled_from(SPECIAL[dtype]), st.integers(0, int(np.iinfo(BITS[dtype]).max)))
    old = draw(hnp.arrays(BITS[dtype], shape, elements=pattern))
    other = draw(hnp.arrays(BITS[dtype], shape, elements=pattern))
    near = (old + draw(hnp.arrays(np.uint16, shape, elements=st.integers(0, 200)))).astype(BITS[dtype])
    which = draw(hnp.arrays(np.uint8, shape, elements=st.integers(0, 2)))
    return tensor(dtype, old), tensor(dtype, np.select([which == 0, which == 1], [old, near], other))


@given(pairs())
@settings(max_examples=80, deadline=None)
def test_full_coding_restores_any_bit_pattern(pair: tuple[RawTensor, RawTensor]) -> None:
    new = pair[1]
    assert np.array_equal(decode_full(encode_full(new), new.dtype, new.shape), new.bits)


def test_one_unit_in_the_last_place_is_one_change_of_three() -> None:
    old = tensor("bfloat16", [0x3F80, 0xC000, 0x3F00])  # 1, -2, 0.5
    new = tensor("bfloat16", [0x3F80, 0xC001, 0x3F00])  # 1, -2.015625, 0.5
    assert count_changed(old, new) == 1
    assert apply_sparse(old, encode_sparse(old, new)).bits.tolist() == [0x3F80, 0xC001, 0x3F00]


def test_zero_and_minus_zero_differ_by_one_change() -> None:
    old, new = tensor("float32", [0x0, 0x0]), tensor("float32", [0x80000000, 0x0])
    assert count_changed(old, new) == 1
    assert apply_sparse(old, encode_sparse(old, new)).bits.tolist() == [0x80000000, 0x0]


def test_step_below_half_an_ulp_is_invisible_in_bfloat16() -> None:
    def rounded(value: float) -> int:
        bits = int(np.float32(value).view(np.uint32))
        return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16

    here = rounded(0.019)
    values = (np.array([here, here + 1], np.uint32) << 16).view(np.float32)
    assert values[1] - values[0] == pytest.approx(1.2207e-4, rel=1e-4)
    old, new = tensor("bfloat16", [here]), tensor("bfloat16", [rounded(0.019 + 3e-6)])
    assert count_changed(old, new) == 0


def test_nan_is_told_from_infinity_and_from_large_numbers() -> None:
    assert not tensor("bfloat16", [0x7F80, 0xFF80, 0x7F7F, 0x0001, 0x8000]).has_nan()
    assert tensor("bfloat16", [0x7F81]).has_nan() and tensor("bfloat16", [0xFFC0]).has_nan()
    assert not tensor("float32", [0x7F800000, 0xFF800000, 0x7F7FFFFF]).has_nan()
    assert tensor("float32", [0x7F800001]).has_nan() and tensor("float32", [0xFFC00000]).has_nan()


@pytest.mark.parametrize("cut", [0, 1, 10, -1])
def test_damaged_payload_is_a_value_error(cut: int) -> None:
    new = tensor("bfloat16", np.arange(1000))
    with pytest.raises(ValueError):
        decode_full(encode_full(new)[:cut], "bfloat16", (1000,))
