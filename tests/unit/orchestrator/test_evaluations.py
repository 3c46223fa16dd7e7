"""Evaluations between batches, as every schedule makes them."""

import pytest
from tests.unit.orchestrator.simulated import Simulation

from everlong.orchestrator.config import AsyncConfig, PartialConfig, RoundsConfig
from everlong.orchestrator.events import CancelEpisode, RecordEval

KINDS = pytest.mark.parametrize("kind", [RoundsConfig, PartialConfig, AsyncConfig])
STUCK = "eval-000000-000"


def run_with_a_stuck_evaluation(kind, **changes):
    """Of three held-out tasks the first never ends; no training group is late."""
    schedule = kind(num_batches=2, groups_per_batch=2, group_size=1, **changes)
    return Simulation(schedule, lambda order: 1e9 if order.episode == STUCK else 1.0, num_evals=3)


def cancelled(run):
    return [action.episode for action in run.log if isinstance(action, CancelEpisode)]


@KINDS
def test_at_its_deadline_an_evaluation_closes_without_who_is_late(kind):
    run = run_with_a_stuck_evaluation(kind, eval_deadline_s=30.0)
    run.run(until=lambda: bool(run.evals))
    assert run.now_s == 30.0 and cancelled(run) == [STUCK]
    run.run()
    assert [action.groups for action in run.log if isinstance(action, RecordEval)] == [(0, 1, 2), (6, 7, 8)]
    assert [batch.deadlines for batch in run.trained] == [0, 0], "no deadline of a batch was met"
    assert cancelled(run) == [STUCK] and not run.alive


@KINDS
def test_who_waits_behind_a_late_one_is_cancelled_with_it(kind):
    run = run_with_a_stuck_evaluation(kind, eval_deadline_s=30.0, max_running=1)
    run.run(until=lambda: bool(run.evals))
    assert run.now_s == 30.0 and sorted(cancelled(run)) == [f"eval-00000{group}-000" for group in range(3)]


@KINDS
def test_without_a_deadline_an_evaluation_waits(kind):
    run = run_with_a_stuck_evaluation(kind, eval_deadline_s=None)
    run.run(until=lambda: bool(run.evals))
    assert run.now_s == 1e9 and not cancelled(run)
