"""Where a float stands among all floats of its width, in units in the last place.

Neighbouring floats stand at neighbouring places, -0.0 just below 0.0; one to one on all patterns, NaN included. All but
the distances are unsigned integers of the values' own width, which is what makes applying a delta fast.
"""

from __future__ import annotations

import numpy as np

# N values, as their bits


def distances(before_N: np.ndarray, after_N: np.ndarray) -> np.ndarray:
    """Signed places from one value to the other, wide enough for any two."""
    wide = np.int32 if before_N.itemsize == 2 else np.int64
    return _places(after_N).astype(wide) - _places(before_N).astype(wide)


def moved(bits_N: np.ndarray, steps_N: np.ndarray) -> np.ndarray:
    """The bits as many places further, `steps_N` being int8; what leads outside, as in a damaged delta, wraps around."""
    signed = np.dtype(f"<i{bits_N.itemsize}")
    return _bits(_places(bits_N) + steps_N.astype(signed).view(bits_N.dtype))


def _places(bits_N: np.ndarray) -> np.ndarray:
    return bits_N ^ (_ones_where_negative(bits_N) | _sign(bits_N))


def _bits(places_N: np.ndarray) -> np.ndarray:
    return places_N ^ (~_ones_where_negative(places_N) | _sign(places_N))


def _sign(values_N: np.ndarray) -> np.integer:
    return values_N.dtype.type(1 << (8 * values_N.itemsize - 1))


def _ones_where_negative(values_N: np.ndarray) -> np.ndarray:
    """All bits set where the highest one is."""
    return (values_N.view(f"<i{values_N.itemsize}") >> (8 * values_N.itemsize - 1)).view(values_N.dtype)
