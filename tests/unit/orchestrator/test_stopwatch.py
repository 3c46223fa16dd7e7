"""Where the seconds of a batch go."""

from everlong.orchestrator.conductor import Stopwatch


def test_every_second_since_the_start_is_in_exactly_one_part() -> None:
    now_s = iter([10.0, 12.0, 15.0, 15.5])
    watch = Stopwatch(lambda: next(now_s))
    for part in ("recording", "training", "recording"):
        watch.lap(part)
    assert watch.seconds == {"seconds/recording": 2.5, "seconds/training": 3.0}
