"""Which tasks a warm-up shows: drawn once by the seed, each at most once."""

from hypothesis import given
from hypothesis import strategies as st

from everlong.orchestrator.cursor import shown_tasks, traces_of_batch


@given(num_tasks=st.integers(1, 60), data=st.data(), seed=st.integers(0, 2**31))
def test_as_many_different_tasks_are_shown_as_asked_in_the_tasks_order(num_tasks, data, seed):
    num_shown = data.draw(st.integers(1, num_tasks))
    shown = shown_tasks(num_shown, num_tasks, seed)
    assert len(set(shown)) == num_shown and shown == sorted(shown)
    assert shown[0] >= 0 and shown[-1] < num_tasks


def test_fewer_shown_tasks_are_among_more_of_them():
    assert set(shown_tasks(5, 40, 3)) < set(shown_tasks(20, 40, 3))


def test_every_shown_trace_comes_once_per_epoch():
    drawn = [index for batch in range(5) for index in traces_of_batch(batch, 8, 40, 0)]
    assert sorted(drawn) == list(range(40))
