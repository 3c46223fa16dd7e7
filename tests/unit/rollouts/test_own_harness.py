"""A harness of one's own is made of the settings, and refused where it is none."""

import sys
import types

import pytest
from pydantic import ValidationError

from everlong.rollouts.config import HarnessConfig
from everlong.rollouts.harnesses.bash import BashHarness
from everlong.rollouts.harnesses.opening import open_harness


class Own:
    def __init__(self, settings: HarnessConfig) -> None:
        self.settings = settings

    async def run(self, task, session, sandbox):
        raise NotImplementedError


@pytest.fixture(autouse=True)
def own_harnesses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("own_harnesses")
    module.__dict__.update(Own=Own, nothing=lambda settings: None, word="no")
    monkeypatch.setitem(sys.modules, "own_harnesses", module)


def test_an_own_harness_gets_the_settings():
    config = HarnessConfig(type="own_harnesses:Own", max_turns=3)
    harness = open_harness(config)
    assert isinstance(harness, Own) and harness.settings is config
    assert isinstance(open_harness(HarnessConfig()), BashHarness)


@pytest.mark.parametrize("name", ["nothing", "word"])
def test_what_makes_no_harness_is_refused(name: str):
    with pytest.raises(
        ValueError, match=rf"harness.type=own_harnesses:{name} must name .* run\(task, session, sandbox\); got"
    ):
        open_harness(HarnessConfig(type=f"own_harnesses:{name}"))


def test_a_type_that_is_neither_ours_nor_a_name_of_code_is_refused():
    with pytest.raises(ValidationError, match="should match pattern"):
        HarnessConfig(type="bsah")
