"""Percentages of a number of trials: what is shown adds up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlong.observe import paired_gain, percent, success_text


@pytest.mark.parametrize(
    ("successes", "trials", "text"),
    [(121, 200, "60.5"), (151, 200, "75.5"), (1, 3, "33"), (10, 19, "53"), (10, 20, "50.0")],
)
def test_a_percentage_has_a_decimal_from_twenty_trials_on(successes: int, trials: int, text: str) -> None:
    assert percent(successes / trials, trials) == text


def test_an_interval_has_the_decimals_of_its_share() -> None:
    assert success_text(0.605, 200) == "60.5 % (53.6 to 67.0)"
    assert success_text(1.0, 10) == "100 % (72 to 100)"


@given(st.integers(20, 300), st.data())
def test_two_shares_and_their_gain_add_up_as_shown(tasks: int, data: st.DataObject) -> None:
    """To what one decimal can say: half of it for each of the three."""
    before, after = (data.draw(st.integers(0, tasks)) for _ in range(2))
    outcomes = [{f"{n:03d}": [float(n < count)] for n in range(tasks)} for count in (before, after)]
    gain = paired_gain(*outcomes, draws=10)
    assert gain is not None
    shown = [float(percent(count / tasks, tasks)) for count in (before, after)]
    assert abs(shown[1] - shown[0] - float(gain.mean_text)) < 0.15 + 1e-9


def test_a_gain_has_the_decimals_of_its_outcomes_and_not_of_its_tasks() -> None:
    before = {f"{n}": [1.0] * 5 + [0.0] * 3 for n in range(10)}
    after = {f"{n}": [1.0] * 6 + [0.0] * 2 for n in range(10)}
    gain = paired_gain(before, after)
    assert gain is not None and gain.text == "+12.5 points (+12.5 to +12.5)", "of 80 episodes"
