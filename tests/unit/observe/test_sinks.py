"""No point is lost, whatever its age, and a half line harms nothing."""

import math
from pathlib import Path

import pytest

from everlong.observe import FanOut, JsonlSink, MemorySink, read_points, read_rows


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


def test_a_batch_that_was_trained_again_keeps_what_was_measured_the_first_time() -> None:
    sink = MemorySink()
    sink.log("batch", 0, {"idle": 0.25, "engine/running": 2.0, "loss": 1.0, "seconds/training": 3.0, "reward": 0.5})
    sink.log("batch", 1, {"idle": 0.5})
    sink.log("batch", 0, {"loss": 1.5, "seconds/training": 9.0, "seconds/scoring": 1.0, "reward": math.nan})
    sink.log("eval", 0, {"success": 1.0})
    again = {
        "idle": 0.25,
        "engine/running": 2.0,
        "loss": 1.5,
        "seconds/training": 3.0,
        "seconds/scoring": 1.0,
        "reward": 0.5,
    }
    assert read_rows(sink.points, "batch") == {0: again, 1: {"idle": 0.5}}
