"""What the row of a batch says of its groups."""

from everlong.contracts.records import ScoredGroup
from everlong.orchestrator.measuring import signal_metrics


def test_groups_that_teach_nothing_are_counted_and_those_without_verdicts_apart() -> None:
    ends = (None, "zero_signal", "zero_signal", "too_few_verdicts")
    scored = [
        ScoredGroup(group=number, task="t", episodes=(), credits=(), discarded=end) for number, end in enumerate(ends)
    ]
    assert signal_metrics(scored) == {"groups": 4, "groups_without_signal": 3, "groups_without_verdicts": 1}
