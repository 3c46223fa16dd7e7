"""Points become panels, and panels a picture."""

import math
from pathlib import Path

import pytest

from everlong.observe import MemorySink, plot_panels, read_panels, wilson_interval


def points() -> list:
    sink = MemorySink()
    sink.log("batch", 1, {"loss": 2.0, "phase/warmup": 1.0})
    sink.log("batch", 0, {"loss": 4.0, "phase/warmup": 1.0})
    sink.log("batch", 2, {"reward": 0.25, "loss": -0.1, "entropy": math.nan})
    sink.log("batch", 3, {"reward": 0.5, "loss": -0.1, "tokens_per_s": 80.0})
    sink.log("batch", 3, {"reward": 0.75, "loss": -0.1})
    sink.log("eval", 0, {"success": 0.5, "episodes": 150.0})
    sink.log("policy_version", 3, {"reward": 9.0})
    return sink.points


def test_panels_count_warm_up_and_rl_batches_from_one_and_the_later_point_counts() -> None:
    reward, warmup, tokens = read_panels(points())
    assert reward.series[0].values == {1: 0.25, 2: 0.75}
    assert (reward.series[1].xs, reward.series[1].ys) == ([0], [0.5])
    assert reward.series[1].intervals[0] == pytest.approx((0.421, 0.579), abs=1e-3)
    assert warmup.series[0].values == {1: 4.0, 2: 2.0}
    assert tokens.series[0].values == {2: 80.0}, "the later row of a batch did not measure it again"


def test_ages_are_shown_where_a_token_was_old_and_nowhere_else() -> None:
    sink = MemorySink()
    sink.log("batch", 0, {"staleness/share/0": 1.0})
    assert read_panels(sink.points) == []
    sink.log("batch", 1, {"staleness/share/0": 0.25, "staleness/share/1": 0.75})
    (ages,) = read_panels(sink.points)
    assert {series.label: series.values for series in ages.series} == {"age 0": {1: 1.0, 2: 0.25}, "age 1": {2: 0.75}}


def test_panels_become_one_png(tmp_path: Path) -> None:
    """Imports matplotlib, which takes most of a second."""
    plot_panels(read_panels(points()), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    with pytest.raises(ValueError, match="no point to plot yet"):
        plot_panels([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [(0, 10, (0.0, 0.27753)), (10, 10, (0.72247, 1.0)), (81, 263, (0.25529, 0.36621)), (0, 0, (0.0, 1.0))],
)
def test_interval_of_a_share_is_wilsons(successes: int, trials: int, expected: tuple[float, float]) -> None:
    assert wilson_interval(successes, trials) == pytest.approx(expected, abs=1e-5)
