"""Who had nothing to do between two batches, worked out by hand."""

import pytest

from everlong.orchestrator.window import BatchWindow


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def window(clock, *, apart):
    one = BatchWindow(clock, apart=apart)
    one.add_training(99.0)  # the warm-up, before there is an engine
    one.open(5.0)
    one.open(77.0)
    return one


@pytest.mark.parametrize(("apart", "idle"), [(False, 0.3), (True, 0.65)])
def test_what_neither_computed_is_idle(apart, idle):
    clock = Clock()
    one = window(clock, apart=apart)
    clock.now_s = 10.0
    one.add_training(2.0)
    values = one.close(10.0, num_samples=12)
    assert values == pytest.approx(
        {
            "seconds/between_batches": 10.0,
            "samples_per_hour": 4320.0,
            "idle/trainer": 0.8,
            "idle/engine": 0.5,
            "idle": idle,
        }
    )


def test_every_row_begins_a_window_of_its_own():
    clock = Clock()
    one = window(clock, apart=False)
    clock.now_s = 10.0
    one.close(10.0, 1)
    clock.now_s = 12.0
    one.add_training(1.0)
    values = one.close(10.5, 1)
    assert (values["seconds/between_batches"], values["samples_per_hour"]) == (2.0, 1800.0)
    assert (values["idle/trainer"], values["idle/engine"], values["idle"]) == (0.5, 0.75, 0.25)


def test_of_an_engine_that_does_not_say_nothing_is_made_up():
    clock = Clock()
    one = BatchWindow(clock, apart=False)
    one.open(None)
    clock.now_s = 4.0
    assert one.close(None, 2).keys() == {"seconds/between_batches", "samples_per_hour", "idle/trainer"}


def test_a_clock_that_stands_still_divides_nothing():
    assert BatchWindow(lambda: 0.0, apart=True).close(1.0, 2) == {"seconds/between_batches": 0.0}
