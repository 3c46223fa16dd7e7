"""No point is lost, whatever its age, and a half line harms nothing."""

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from everlong.observe import ConsoleSink, FanOut, JsonlSink, MemorySink, read_points
from everlong.observe.console import format_duration
from everlong.observe.plots import plot_curves, read_curves


def where(points: list) -> list[tuple[str, int, dict[str, float]]]:
    return [(point.axis, point.step, point.values) for point in points]


def test_older_steps_and_other_axes_are_all_stored_row_by_row_in_every_sink(tmp_path: Path) -> None:
    memory, path = MemorySink(), tmp_path / "run" / "metrics.jsonl"
    sinks = FanOut(memory, JsonlSink(path))
    rows: list[tuple[str, int, dict[str, float]]] = [
        ("batch", 249, {"loss": 0.5}),
        ("eval", 203, {"accuracy": 0.25}),
        ("policy_version", 5, {"samples": 3.0}),
        ("policy_version", 4, {"samples": 7.0}),
        ("batch", 248, {"loss": 0.75}),
    ]
    for axis, step, values in rows:
        sinks.log(axis, step, values)
    sinks.close()
    assert where(memory.points) == where(read_points(path)) == rows
    curves = {(curve.axis, curve.name): (curve.steps, curve.values) for curve in read_curves(path)}
    assert curves == {
        ("batch", "loss"): ([248, 249], [0.75, 0.5]),
        ("eval", "accuracy"): ([203], [0.25]),
        ("policy_version", "samples"): ([4, 5], [7.0, 3.0]),
    }


def test_file_is_appended_to_after_a_restart(tmp_path: Path) -> None:
    for step in range(2):
        sink = JsonlSink(tmp_path / "m.jsonl")
        sink.log("batch", step, {"x": 1.0})
        sink.close()
        sink.close()
    assert [point.step for point in read_points(tmp_path / "m.jsonl")] == [0, 1]


@pytest.mark.parametrize("half", [b'{"axis":"batch","st', b'{"axis":"batch"}', b"\xff\xfe", b"\n\n"])
def test_half_line_of_a_killed_writer_costs_only_itself(tmp_path: Path, half: bytes) -> None:
    path = tmp_path / "m.jsonl"
    sink = JsonlSink(path)
    sink.log("batch", 0, {"x": 1.0})
    sink.close()
    with path.open("ab") as file:
        file.write(half)
    assert [point.step for point in read_points(path)] == [0]
    sink = JsonlSink(path)
    sink.log("batch", 1, {"x": 2.0})
    sink.close()
    assert [point.step for point in read_points(path)] == [0, 1]


def test_point_is_in_the_file_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log("batch", 0, {"x": 1.0})
    assert len(read_points(tmp_path / "m.jsonl")) == 1
    sink.close()


def test_value_that_is_no_number_is_absent_and_the_line_stays_json(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log("batch", 0, {"loss": math.nan, "x": math.inf, "y": 1.0})
    sink.close()
    assert read_points(tmp_path / "m.jsonl")[0].values == {"loss": None, "x": None, "y": 1.0}
    assert "NaN" not in (tmp_path / "m.jsonl").read_text()


def test_missing_file_has_no_points(tmp_path: Path) -> None:
    assert read_points(tmp_path / "nothing.jsonl") == []


def test_failing_sink_keeps_no_point_from_the_others() -> None:
    class Failing(MemorySink):
        def log(self, axis: str, step: int, values: dict[str, float]) -> None:
            raise OSError("disk full")

    memory = MemorySink()
    with pytest.raises(OSError, match="disk full"):
        FanOut(Failing(), memory).log("batch", 0, {"x": 1.0})
    assert where(memory.points) == [("batch", 0, {"x": 1.0})]


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("terminal", [False, True])
def test_console_says_batch_reward_speed_episodes_and_time_left(terminal: bool) -> None:
    text, clock = io.StringIO(), Clock()
    sink = ConsoleSink(10, Console(file=text, width=50, force_terminal=terminal, color_system=None), clock)
    values = {"reward": 0.5, "sampled_tokens": 60_000.0, "reason/done": 60.0, "reason/stalled": 4.0, "loss": 1.0}
    clock.now_s = 60.0
    sink.log("batch", 0, values)
    clock.now_s = 660.0
    sink.log("policy_version", 3, {"samples": 1.0})
    sink.log("batch", 2, values)
    sink.log("eval", 1, {"accuracy": 0.625, "episodes": 40.0})
    sink.close()
    sink.close()
    shown = text.getvalue()
    assert "batch 1/10  reward 0.500  1,000 tokens/s  done 60  stalled 4\n" in shown
    assert "batch 3/10  reward 0.500  100 tokens/s  done 60  stalled 4  35 min 00 s left\n" in shown
    assert "eval 1  accuracy 0.625  episodes 40\n" in shown
    assert "samples" not in shown and ("30%  11 min 00 s gone" in shown) == terminal


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 00 s"), (3780, "1 h 03 min"), (61, "1 min 01 s")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_curves_become_a_png(tmp_path: Path) -> None:
    """Imports matplotlib, which takes most of a second."""
    sink = JsonlSink(tmp_path / "m.jsonl")
    for step in (2, 0, 1):
        sink.log("batch", step, {"reward": step / 2, "loss": math.nan})
    plot_curves(tmp_path / "m.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    with pytest.raises(ValueError, match="has no point of entropy: nothing to plot"):
        plot_curves(tmp_path / "m.jsonl", tmp_path / "none.png", metrics=("entropy",))
    assert not (tmp_path / "none.png").exists()
