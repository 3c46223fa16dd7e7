"""Whole runs of the toy with experts through the command line, in processes of their own, so each takes many seconds."""

import json

import pytest
from tests.campaign.small_run import make_tasks, small_config, start_train

from everlong.cli.run_folder import RunFolder
from everlong.ledger import EpisodeStore, read_lifecycle
from everlong.models.checkpoint import load_checkpoint
from everlong.models.config import ToyMoeModel
from everlong.models.moe.config import EXPERT_WEIGHTS, EXPERTS, MoeConfig
from everlong.models.numerics import NumericsUnavailable, self_test
from everlong.orchestrator.config import RoundsConfig
from everlong.storage import open_store
from everlong.trainer.config import CriticConfig, LinearHead, RatioConfig, ReplayConfig, TrainerConfig
from everlong.trajectories.credit import GaeConfig

NUM_WARMUP, NUM_BATCHES = 3, 3


def run(folder, replay, **changes):
    """The metrics of its RL batches."""
    tasks = make_tasks(folder.parent / "tasks", easy=True)
    config = small_config(tasks, folder, "toy", NUM_WARMUP).model_copy(
        update={
            "replay": replay,
            # a critic expects at first what no episode gets, so all of them teach, whatever the untrained policy earns
            "credit": GaeConfig(),
            "critic": CriticConfig(head=LinearHead(initial=0.4)),
            "schedule": RoundsConfig(num_batches=NUM_BATCHES, groups_per_batch=2, group_size=3),
            **changes,
        }
    )
    control = start_train(config)
    assert control.wait(600) == 0, folder.with_suffix(".log").read_text()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row["values"] for row in rows if row["axis"] == "batch" and row["step"] >= NUM_WARMUP]
    assert len(rows) == NUM_BATCHES and all(row["grad_norm"] > 0 for row in rows)
    return rows


@pytest.fixture(scope="module", autouse=True)
def aligned():
    try:
        self_test(intermediate_size=88, num_experts=8)
    except NumericsUnavailable as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
def test_at_staleness_0_the_trainer_computes_what_the_sampler_recorded_to_the_bit(tmp_path, router):
    weights = "recorded" if router == "sigmoid" else "recomputed"
    folder = tmp_path / "run"
    rows = run(folder, ReplayConfig(routes="rollout", weights=weights), model=ToyMoeModel(router=router))
    width = 6 * 2 * (1 if weights == "recomputed" else 5)
    for row in rows:
        assert row["mismatch/max"] == 0.0 and row["ratio/max"] == row["ratio/mean"] == 1.0
        assert row["replay/overlap"] == 1.0 and row["replay/replayed"] > 0.8
        assert row["record/decision_bytes_per_token"] == width
    every_token_of_every_episode_has_its_routes(
        folder, {EXPERTS, EXPERT_WEIGHTS} if weights == "recorded" else {EXPERTS}
    )
    exported = load_checkpoint(folder / "checkpoint").config
    assert isinstance(exported, MoeConfig) and exported.router == router


def every_token_of_every_episode_has_its_routes(folder, names):
    run_folder = RunFolder(folder)
    store = EpisodeStore(open_store(run_folder.store_url(run_folder.read_config())))
    views = [view for view in read_lifecycle(run_folder.ledger).episodes.values() if view.payload_key]
    turns = [turn for view in views for turn in store.get(view.payload_key, view.payload_hash).turns]
    assert any(turn.parent >= 0 for turn in turns), "some continue a turn before them"
    for turn in turns:
        columns = turn.context + turn.sampled
        assert columns.decisions.rows.keys() == names
        for name in names:
            lacks_one = turn.parent < 0
            assert columns.decisions.known(name).tolist() == [not lacks_one] + [True] * (len(columns) - 1)


def test_the_first_pass_of_a_batch_decides_for_its_other_updates(tmp_path):
    rows = run(
        tmp_path / "run",
        ReplayConfig(routes="recompute"),
        model=ToyMoeModel(),
        ratio=RatioConfig(base="proximal"),
        trainer=TrainerConfig(updates_per_batch=3),
    )
    assert all(row["mismatch/max"] == 0.0 and row["replay/replayed"] == 1.0 for row in rows)
    assert min(row["replay/overlap"] for row in rows) < 1.0, "the routers moved on, and were not followed"
    assert all(row["record/decision_bytes_per_token"] == 0 for row in rows), "nothing was recorded at sampling"
