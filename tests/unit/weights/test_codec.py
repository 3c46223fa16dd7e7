"""Exact coding: any bit pattern comes back, and only what changed is sent."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from everlong.weights.codec import (
    WIDE_GAP,
    apply_delta,
    apply_steps,
    count_changed,
    decode_full,
    encode_delta,
    encode_full,
    encode_steps,
)
from everlong.weights.tensors import BITS, RawTensor

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


CODINGS = pytest.mark.parametrize(
    ("encode", "apply"), [(encode_delta, apply_delta), (encode_steps, apply_steps)], ids=["gaps", "steps"]
)


@CODINGS
@given(pair=pairs())
@settings(max_examples=100, deadline=None)
def test_delta_restores_any_bit_pattern(pair: tuple[RawTensor, RawTensor], encode, apply) -> None:
    old, new = pair
    before = old.bits.copy()
    applied = apply(old, encode(old, new))
    assert np.array_equal(applied.bits, new.bits) and applied.shape == new.shape
    assert np.array_equal(old.bits, before)


@given(pairs())
@settings(max_examples=80, deadline=None)
def test_full_coding_restores_any_bit_pattern(pair: tuple[RawTensor, RawTensor]) -> None:
    new = pair[1]
    assert np.array_equal(decode_full(encode_full(new), new.dtype, new.shape), new.bits)


@pytest.mark.parametrize("gap", [WIDE_GAP - 1, WIDE_GAP, WIDE_GAP + 1, 3 * WIDE_GAP])
@pytest.mark.parametrize("steps", [1, -1, 127, -127, 128, -128, -129])
def test_wide_gaps_and_far_steps_escape(gap: int, steps: int) -> None:
    old = tensor("bfloat16", np.full(gap + 3, 0x3F80))
    new = tensor("bfloat16", old.bits.copy())
    new.bits[[0, gap + 1, gap + 2]] += np.uint16(steps % 65536)
    assert np.array_equal(apply_delta(old, encode_delta(old, new)).bits, new.bits)
    assert np.array_equal(apply_steps(old, encode_steps(old, new)).bits, new.bits)


@CODINGS
def test_every_bfloat16_pattern_goes_to_every_special_one_and_back(encode, apply) -> None:
    every = tensor("bfloat16", np.arange(65536))
    for special in SPECIAL["bfloat16"]:
        one = tensor("bfloat16", np.full(65536, special))
        assert np.array_equal(apply(every, encode(every, one)).bits, one.bits)
        assert np.array_equal(apply(one, encode(one, every)).bits, every.bits)


def test_one_unit_in_the_last_place_is_one_change_of_three() -> None:
    old = tensor("bfloat16", [0x3F80, 0xC000, 0x3F00])  # 1, -2, 0.5
    new = tensor("bfloat16", [0x3F80, 0xC001, 0x3F00])  # 1, -2.015625, 0.5
    assert count_changed(old, new) == 1
    assert apply_delta(old, encode_delta(old, new)).bits.tolist() == [0x3F80, 0xC001, 0x3F00]


def test_zero_and_minus_zero_differ_by_one_change() -> None:
    old, new = tensor("float32", [0x0, 0x0]), tensor("float32", [0x80000000, 0x0])
    assert count_changed(old, new) == 1
    assert apply_delta(old, encode_delta(old, new)).bits.tolist() == [0x80000000, 0x0]


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
    old, new = tensor("bfloat16", np.arange(1000)), tensor("bfloat16", np.arange(1000) + 1)
    with pytest.raises(ValueError):
        apply_delta(old, encode_delta(old, new)[:cut])
    with pytest.raises(ValueError):
        apply_steps(old, encode_steps(old, new)[:cut])
    with pytest.raises(ValueError):
        decode_full(encode_full(new)[:cut], "bfloat16", (1000,))


def test_delta_for_a_larger_tensor_is_a_value_error() -> None:
    old, new = tensor("bfloat16", np.zeros(10)), tensor("bfloat16", np.ones(10))
    with pytest.raises(ValueError, match="changes value 9 of a tensor with 5 values"):
        apply_delta(tensor("bfloat16", np.zeros(5)), encode_delta(old, new))
    with pytest.raises(ValueError, match="0 far values need 0 bytes, got 5"):
        apply_steps(tensor("bfloat16", np.zeros(5)), encode_steps(old, new))
    with pytest.raises(ValueError, match="each of 11 values"):
        apply_steps(tensor("bfloat16", np.zeros(11)), encode_steps(old, new))


def adam_like(step: float) -> tuple[RawTensor, RawTensor]:
    """Weights before and after float32 masters moved by at most `step` each, as they are published."""
    rng = np.random.default_rng(0)
    master = rng.normal(0, 0.02, 200_000).astype(np.float32)
    moved = master + rng.uniform(-step, step, 200_000).astype(np.float32)
    old, new = (
        tensor("bfloat16", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
        for bits in (master.view(np.uint32), moved.view(np.uint32))
    )
    return old, new


def test_a_step_for_every_value_is_no_larger_once_most_values_changed() -> None:
    old, new = adam_like(2e-4)
    assert count_changed(old, new) > old.size / 2
    assert len(encode_steps(old, new)) <= 1.05 * len(encode_delta(old, new)) < new.bits.nbytes / 2
    old, new = adam_like(1e-6)
    assert len(encode_delta(old, new)) < len(encode_steps(old, new))


def test_sparse_adam_like_step_is_fifty_times_smaller_than_dense() -> None:
    old, new = adam_like(1e-6)
    assert 0.015 < count_changed(old, new) / old.size < 0.035
    assert len(encode_delta(old, new)) < new.bits.nbytes / 50
