"""What changed, by groups of old exponents: exact for any bits, near the entropy, and refused where it was damaged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everlong.cli.benches.delta_references import entropy_bound
from everlong.weights import sparse
from everlong.weights.sparse import apply_sparse, encode_sparse
from everlong.weights.tensors import BITS, RawTensor

SPECIAL = {
    "bfloat16": [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F7F, 0xFF7F],
    "float32": [0x0, 0x80000000, 0x1, 0x80000001, 0x7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF, 0x7F7FFFFF],
}


def tensor(dtype: str, bits: np.ndarray) -> RawTensor:
    return RawTensor(dtype, bits.shape, bits.astype(BITS[dtype]))  # type: ignore[arg-type]


def rounded(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def adam_like(size: int, rate: float, seed: int = 0) -> tuple[RawTensor, RawTensor]:
    """Before and after every float32 master moved up or down by the learning rate."""
    rng = np.random.default_rng(seed)
    master = rng.normal(0, 0.02, size).astype(np.float32)
    moved = master + np.float32(rate) * rng.choice([-1, 1], size).astype(np.float32)
    return tensor("bfloat16", rounded(master)), tensor("bfloat16", rounded(moved))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[RawTensor, RawTensor]:
    """Two tensors of one layout: normal weights or arbitrary patterns, of which any share moved near or anywhere."""
    dtype = draw(st.sampled_from(sorted(BITS)))
    size = draw(st.one_of(st.integers(0, 40), st.integers(0, 5000)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    most = int(np.iinfo(BITS[dtype]).max)
    if draw(st.booleans()):
        weights = rng.normal(0, draw(st.sampled_from([1e-39, 0.02, 1e30])), size).astype(np.float32)
        old = weights.view(np.uint32) if dtype == "float32" else rounded(weights)
    else:
        old = rng.integers(0, most, size, dtype=BITS[dtype], endpoint=True)
    old = np.where(rng.random(size) < 0.05, rng.choice(np.array(SPECIAL[dtype], BITS[dtype]), size), old)
    reach = draw(st.sampled_from([1, 3, 200, 400]))
    near = (old.astype(np.int64) + rng.integers(-reach, reach, size, endpoint=True)).astype(BITS[dtype])
    anywhere = rng.integers(0, most, size, dtype=BITS[dtype], endpoint=True)
    share = draw(st.sampled_from([0.0, 0.001, 0.02, 0.3, 1.0]))
    new = np.where(rng.random(size) < share, np.where(rng.random(size) < 0.9, near, anywhere), old)
    return tensor(dtype, old), tensor(dtype, new)


@given(pairs())
@settings(max_examples=120, deadline=None)
def test_any_bits_come_back_and_the_old_ones_stay(pair: tuple[RawTensor, RawTensor]) -> None:
    old, new = pair
    before = old.bits.copy()
    applied = apply_sparse(old, encode_sparse(old, new))
    assert np.array_equal(applied.bits, new.bits) and applied.bits.shape == new.bits.shape
    assert np.array_equal(old.bits, before)


def test_every_bfloat16_pattern_goes_to_every_special_one_and_back() -> None:
    every = tensor("bfloat16", np.arange(65536))
    for special in SPECIAL["bfloat16"]:
        one = tensor("bfloat16", np.full(65536, special))
        assert np.array_equal(apply_sparse(every, encode_sparse(every, one)).bits, one.bits)
        assert np.array_equal(apply_sparse(one, encode_sparse(one, every)).bits, every.bits)


@pytest.mark.parametrize("steps", [1, -1, 2, -2, 127, -127, 128, 255, 256, -256, 257, -257, 5000])
def test_steps_of_any_length_arrive_however_many_there_are(steps: int) -> None:
    old = tensor("bfloat16", np.full(4000, 0x3F80))
    for changed in (1, 300, 4000):
        bits = old.bits.copy()
        bits[:changed] += np.uint16(steps % 65536)
        new = tensor("bfloat16", bits)
        assert np.array_equal(apply_sparse(old, encode_sparse(old, new)).bits, new.bits)


@pytest.mark.parametrize("size", [1, 999, 1000, 1001, 3500])
def test_pieces_stand_for_themselves(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "PIECE", 1000)
    monkeypatch.setattr(sparse, "CHUNK", 320)
    old, new = adam_like(size, 3e-5)
    assert np.array_equal(apply_sparse(old, encode_sparse(old, new)).bits, new.bits)


@pytest.mark.parametrize("rate", [1e-7, 2e-7, 4e-7, 2e-6, 1.3e-5, 3e-5])
def test_size_is_within_fifteen_percent_of_the_conditional_entropy(rate: float) -> None:
    old, new = adam_like(1 << 20, rate)
    bound = entropy_bound(old, new) / 8
    assert 0.99 * bound < len(encode_sparse(old, new)) <= 1.15 * bound


def test_entropy_bound_of_four_values_by_hand() -> None:
    """Of four values with one exponent one moved: log2 4^4 - log2 3^3 bits for the position, none for the distance."""
    old, new = tensor("bfloat16", np.full(4, 0x3F80)), tensor("bfloat16", np.array([0x3F80, 0x3F81, 0x3F80, 0x3F80]))
    assert entropy_bound(old, new) == pytest.approx(8 - 3 * np.log2(3))
    assert entropy_bound(old, old) == 0


def test_a_percent_of_changes_is_a_hundred_times_smaller_than_the_weights() -> None:
    old, new = adam_like(1 << 20, 2e-7)
    assert 0.008 < np.mean(old.bits != new.bits) < 0.015
    assert 100 * len(encode_sparse(old, new)) < new.bits.nbytes


@pytest.mark.parametrize("rate", [1e-6, 3e-5])
def test_each_flipped_byte_and_each_cut_is_refused_or_seen_by_the_checksum(rate: float) -> None:
    old, new = adam_like(3000, rate)
    payload, checksum = encode_sparse(old, new), new.checksum()
    rng = np.random.default_rng(0)
    for at in range(len(payload)):
        for damaged in (payload[:at], _flipped(payload, at, 1 << int(rng.integers(8))), _flipped(payload, at, 0xFF)):
            try:
                applied = apply_sparse(old, damaged)
            except ValueError:
                continue
            assert applied.checksum() != checksum or np.array_equal(applied.bits, new.bits)


def _flipped(payload: bytes, at: int, mask: int) -> bytes:
    return payload[:at] + bytes([payload[at] ^ mask]) + payload[at + 1 :]


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_a_value_error(payload: bytes) -> None:
    old = tensor("bfloat16", np.arange(100))
    try:
        applied = apply_sparse(old, payload)
    except ValueError:
        return
    assert applied.shape == old.shape


def test_delta_for_another_size_is_refused() -> None:
    old, new = adam_like(1000, 3e-5)
    payload = encode_sparse(old, new)
    with pytest.raises(ValueError):
        apply_sparse(tensor("bfloat16", old.bits[:10]), payload)
    with pytest.raises(ValueError, match="a tensor of 0 values has 0 pieces, got 1"):
        apply_sparse(tensor("bfloat16", old.bits[:0]), payload)


def test_nothing_changed_is_next_to_nothing() -> None:
    old, _ = adam_like(1000, 3e-5)
    assert len(encode_sparse(old, old)) < 10
    assert np.array_equal(apply_sparse(old, encode_sparse(old, old)).bits, old.bits)
