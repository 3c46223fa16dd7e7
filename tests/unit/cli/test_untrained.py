"""What a run says whose RL batches trained nothing."""

from pathlib import Path

import pytest

from everlong.cli.config import RunConfig, WarmupConfig
from everlong.cli.untrained import taught_nothing, untrained_lines
from everlong.contracts.records import Purpose
from everlong.ledger import EpisodeState, EpisodeView
from everlong.models.config import ScriptedModel, ToyModel
from everlong.orchestrator.config import AsyncConfig

RUN, TOY = Path("runs/one"), RunConfig(model=ToyModel())


def ended(*reasons: str, trained: int = 0) -> list[EpisodeView]:
    """Training episodes that ended for these reasons."""
    common = {"task": "t", "attempt": 0, "incarnation": 0, "state": EpisodeState.CANCELLED, "purpose": Purpose.TRAIN}
    return [
        EpisodeView(episode=f"e{n}", group=n, reason=reason, trained=trained, **common)
        for n, reason in enumerate(reasons)
    ]


def test_it_says_how_the_episodes_ended_and_what_to_do_about_most_of_them() -> None:
    views = ended("deadline", "never_began", "deadline")
    assert untrained_lines(TOY, 2, views, RUN) == [
        "not one token was trained in all 2 RL batches: the weights are those from before RL",
        "  its 3 episodes ended as: deadline 2, never_began 1",
        "  give more time (schedule.batch_deadline_s), or the agent less to do in it (harness.max_turns)",
    ]


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("never_began", "schedule.max_running) or more time (schedule.group_deadline_s)"),
        ("zero_signal", "warmup.num_batches"),
        ("over_age", "raise schedule.max_staleness"),
        ("harness_crash", "everlong view runs/one EPISODE"),
    ],
)
def test_each_cause_has_its_remedy(reason: str, said: str) -> None:
    config = RunConfig(model=ToyModel(), schedule=AsyncConfig())
    first, _, advice = untrained_lines(config, 1, ended(reason), RUN)
    assert "its one RL batch" in first and said in advice


def test_a_run_that_trained_a_token_or_had_no_rl_batch_says_nothing() -> None:
    assert untrained_lines(TOY, 2, ended("done", trained=1), RUN) == untrained_lines(TOY, 0, [], RUN) == []


def test_only_a_run_in_which_nothing_was_learnt_and_something_could_be_fails() -> None:
    lines = untrained_lines(TOY, 1, ended("deadline"), RUN)
    assert taught_nothing(TOY, lines) and not taught_nothing(TOY, [])
    assert not taught_nothing(TOY.model_copy(update={"warmup": WarmupConfig(num_batches=1)}), lines)
    assert not taught_nothing(TOY.model_copy(update={"model": ScriptedModel()}), lines)
