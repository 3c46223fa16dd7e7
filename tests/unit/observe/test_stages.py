"""What is said while there is no batch to show."""

import io

import pytest
from rich.console import Console

from everlong.observe import SILENT, Stages


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("terminal", [False, True], ids=["plain", "live"])
def test_a_stage_is_said_before_it_is_done_and_its_time_after_it_where_it_took_a_second(terminal: bool) -> None:
    text, clock = io.StringIO(), Clock()
    stages = Stages(Console(file=text, force_terminal=terminal, color_system=None), clock)
    with stages.stage("starting [the] worker"):
        assert text.getvalue() == "starting [the] worker\n"
        clock.now_s += 63.0
    with stages.stage("reading the tasks"):
        clock.now_s += 0.9
    assert text.getvalue() == "starting [the] worker\n  took 1 min 03 s\nreading the tasks\n"


def test_a_stage_that_breaks_has_no_time() -> None:
    text, clock = io.StringIO(), Clock()
    with pytest.raises(ValueError, match="no"), Stages(Console(file=text), clock).stage("trying"):
        clock.now_s += 9.0
        raise ValueError("no")
    assert text.getvalue() == "trying\n"


def test_silence_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with SILENT.stage("anything"):
        pass
    assert capsys.readouterr() == ("", "")
