"""The gain between two evaluations of the same tasks."""

import numpy as np
import pytest

from everlong.observe import paired_gain


def outcomes(values) -> dict[str, list[float]]:
    return {f"task-{number:03d}": [float(value)] for number, value in enumerate(values)}


def test_gain_is_the_mean_difference_over_tasks_and_its_interval_holds_the_normal_one():
    random = np.random.default_rng(3)
    before = random.random(400) < 0.2
    after = before | (random.random(400) < 0.3)
    gain = paired_gain(outcomes(before), outcomes(after))
    difference = after.astype(float) - before
    reach = 1.96 * difference.std() / 20
    assert gain.mean == pytest.approx(difference.mean())
    assert (gain.low, gain.high) == pytest.approx((gain.mean - reach, gain.mean + reach), abs=0.005)


def test_pairing_is_narrower_than_two_samples_where_the_same_tasks_succeed():
    before = np.arange(200) % 2
    after = before.copy()
    after[:20] = 1
    gain = paired_gain(outcomes(before), outcomes(after))
    assert gain.mean == pytest.approx(0.05) and gain.low > 0
    assert gain.text == "+5.0 points (+2.0 to +8.0)"


def test_no_change_includes_nothing_but_zero():
    same = outcomes(np.arange(50) % 2)
    assert paired_gain(same, same)[:3] == (0.0, 0.0, 0.0)


def test_a_task_without_a_verdict_on_one_side_is_left_out():
    gain = paired_gain({"a": [0.0], "b": [1.0], "c": []}, {"a": [1.0, 0.0], "c": [1.0]})
    assert (gain.mean, gain.num_tasks) == (0.5, 1)


def test_evaluations_without_a_common_task_have_no_gain():
    assert paired_gain({"a": [1.0]}, {"b": [1.0]}) is None
