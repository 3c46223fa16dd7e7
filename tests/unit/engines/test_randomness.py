"""Random numbers have names: run seed, episode, turn and position."""

import numpy as np
import pytest

from everlong.contracts.records import SamplingKey
from everlong.engines.randomness import stream_of, uniforms


def test_the_sequence_is_splitmix64():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # of seed 0, by its authors' code
    expected = [(x >> 12) / 2**52 for x in published]
    assert uniforms(np.zeros(3, np.uint64), np.arange(3)).tolist() == expected


def test_a_number_depends_on_its_own_name_alone():
    streams = np.arange(100, dtype=np.uint64)
    together = uniforms(streams, np.full(100, 5))
    assert uniforms(streams[42:43], np.array([5]))[0] == together[42]


def test_numbers_are_spread_evenly_below_one():
    values = uniforms(
        np.full(20000, stream_of(SamplingKey(run_seed=1, episode="e", turn=0)), np.uint64), np.arange(20000)
    )
    assert values.min() >= 0 and values.max() < 1
    # standard deviation of the mean is 0.002, of a count of one tenth 42
    assert values.mean() == pytest.approx(0.5, abs=0.01)
    assert np.histogram(values, 10, (0, 1))[0] == pytest.approx(np.full(10, 2000), abs=220)


def test_every_part_of_the_key_names_another_stream():
    keys = [(1, "a", 1), (2, "a", 1), (1, "b", 1), (1, "a", 2), (11, "a", 1), (1, "1/a", 1), (1, "a/1", 1), (1, "", 11)]
    assert len({stream_of(SamplingKey(run_seed=s, episode=e, turn=t)) for s, e, t in keys}) == len(keys)
