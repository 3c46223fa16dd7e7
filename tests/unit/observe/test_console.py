"""What a run says in a terminal, and in a log."""

import io

import pytest
from rich.console import Console

from everlong.observe import ConsoleSink
from everlong.observe.console import format_duration


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("terminal", [False, True])
def test_console_says_batch_reward_speed_episodes_and_time_left(terminal: bool) -> None:
    text, clock = io.StringIO(), Clock()
    console = Console(file=text, width=80, force_terminal=terminal, color_system=None)
    sink = ConsoleSink(10, console=console, clock=clock)
    values = {"reward": 0.5, "tokens_per_s": 1000.4, "reason/stalled": 4.0, "reason/done": 60.0, "loss": 1.0}
    clock.now_s = 60.0
    sink.log("batch", 0, values)
    clock.now_s = 660.0
    sink.log("policy_version", 3, {"samples": 1.0})
    sink.log("batch", 2, values)
    sink.close()
    sink.close()
    shown = text.getvalue()
    assert "batch  1/10  reward 0.500  1,000 tokens/s  done 60  stalled 4\n" in shown
    assert "batch  3/10  reward 0.500  1,000 tokens/s  done 60  stalled 4  35 min 00 s left\n" in shown
    assert "samples" not in shown and ("11 min 00 s gone" in shown) == terminal


AGREE = {"groups": 4.0, "groups_without_signal": 4.0, "groups_without_verdicts": 0.0, "tokens/trained": 0.0}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (AGREE, "no signal: all 4 groups agree  "),
        ({**AGREE, "groups": 1.0, "groups_without_signal": 1.0}, "no signal: its one group agrees  "),
        ({**AGREE, "groups_without_verdicts": 1.0}, "no signal: of 4 groups 3 agree, 1 lack verdicts  "),
        ({**AGREE, "groups_without_signal": 3.0, "tokens/trained": 9.0}, ""),
        ({**AGREE, "tokens/trained": 9.0}, ""),
    ],
    ids=["all agree", "one group", "some without verdict", "one differs", "agreeing ones are kept"],
)
def test_a_batch_that_taught_nothing_says_so(values: dict[str, float], said: str) -> None:
    text = io.StringIO()
    ConsoleSink(10, console=Console(file=text, force_terminal=False)).log("batch", 0, {"reward": 1.0, **values})
    assert text.getvalue() == f"batch  1/10  {said}reward 1.000\n"


def test_who_got_no_slot_is_said() -> None:
    text = io.StringIO()
    sink = ConsoleSink(10, console=Console(file=text, force_terminal=False, width=200))
    sink.log("batch", 0, {"groups_postponed": 2.0, "reason/never_began": 3.0})
    sink.log("eval", 1, {"success": 1.0, "episodes": 2.0, "without_verdict": 4.0, "reason/never_began": 3.0})
    sink.log("eval", 2, {"episodes": 0.0, "without_verdict": 4.0, "reason/never_began": 3.0})
    batch, some, none = text.getvalue().splitlines()
    assert batch == "batch  1/10  left to the next batch, since no slot was free: 2 groups  never_began 3"
    assert some.endswith("of 2 episodes, 4 without verdict (3 of them never began)")
    assert none.endswith("no verdict in 4 episodes (3 of them never began)")


def test_warm_up_shares_lines_and_has_a_pace_of_its_own() -> None:
    text, clock = io.StringIO(), Clock()
    console = Console(file=text, width=80, force_terminal=False)
    sink = ConsoleSink(26, 24, console=console, clock=clock)
    for step in range(24):
        clock.now_s += 1.0
        sink.log("batch", step, {"loss": 4.0 - step / 8, "phase/warmup": 1.0})
    for step in (24, 25):
        clock.now_s += 60.0
        sink.log("batch", step, {"reward": 0.5})
    assert text.getvalue().splitlines() == [
        "warm-up  1/24  loss 4.000",
        "warm-up 10/24  loss 2.875  14 s of warm-up left",
        "warm-up 20/24  loss 1.625  4 s of warm-up left",
        "warm-up 24/24  loss 1.125",
        "batch 1/2  reward 0.500",
        "batch 2/2  reward 0.500",
    ]


def test_evaluation_shows_success_with_its_interval_and_who_has_no_verdict() -> None:
    text = io.StringIO()
    sink = ConsoleSink(10, console=Console(file=text, width=80, force_terminal=False))
    sink.log("eval", 0, {"success": 0.5, "episodes": 150.0, "without_verdict": 0.0})
    sink.log("eval", 8, {"success": 1.0, "episodes": 10.0, "without_verdict": 2.0})
    sink.log("eval", 9, {"episodes": 0.0, "without_verdict": 7.0})
    assert text.getvalue().splitlines() == [
        "  held-out tasks before RL  success 50.0 % (42.1 to 57.9) of 150 episodes",
        "  held-out tasks after 8 RL batches  success 100 % (72 to 100) of 10 episodes, 2 without verdict",
        "  held-out tasks after 9 RL batches  no verdict in 7 episodes",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59.6, "1 min 00 s"), (3780, "1 h 03 min"), (61, "1 min 01 s")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
