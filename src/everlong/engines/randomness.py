"""One uniform number per sampled token, named by run seed, episode, turn and position in the turn.

The name of a turn is hashed to the 64-bit start of a splitmix64 sequence (Steele et al. 2014, "Fast splittable
pseudorandom number generators"), whose n-th value is computed directly. No state: a retry draws the same numbers.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from everlong.contracts.records import SamplingKey

# N tokens

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def stream_of(key: SamplingKey) -> int:
    """64 bits that name the turn's sequence of random numbers."""
    name = f"{key.run_seed}/{key.turn}/{key.episode}".encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")


def uniforms(streams_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """float64[N] in [0, 1) for uint64 streams and 0-based positions in the turn.

    52 bits, one less than a float64 could hold: so its product with any sum stays below that sum after rounding.
    """
    with np.errstate(over="ignore"):
        x = np.asarray(streams_N, np.uint64) + (np.asarray(positions_N, np.uint64) + np.uint64(1)) * _GAMMA
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(12)).astype(np.float64) * 2.0**-52
