"""Losses, bases, corrections, replay, credit, cuts and weights in every combination, and the page that says which go together."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.loop.trainer.pairs import combinations, critic_step, page, step
from tests.loop.trainer.test_combinations import LOSSES, name_of


def is_sound(gradient):
    return all(part.isfinite().all() for part in gradient) and max(part.abs().max() for part in gradient) > 1e-5


@pytest.mark.parametrize("loss", LOSSES, ids=name_of)
def test_every_combination_makes_a_step_or_is_refused_by_name(loss):
    flat, num_trained, num_refused = {}, 0, 0
    for combination in sorted(combinations([loss]), key=lambda combination: combination.cut.shared):
        refused = combination.refusal()
        if refused is not None:
            assert sum(name in refused for name in combination.names()) >= 2, refused
            num_refused += 1
            continue
        gradient = step(combination)
        assert is_sound(gradient), combination
        if combination.cut.valued:
            assert is_sound(critic_step(combination.cut)), combination
        num_trained += 1
        if combination.objective.of_branches:
            continue  # a shared token is a part of every branch's measure there, and of one branch here
        apart = replace(combination, cut=replace(combination.cut, shared=False))
        for mine, other in zip(gradient, flat.setdefault(apart, gradient), strict=True):
            torch.testing.assert_close(
                mine, other, rtol=1e-3, atol=3e-5, msg=lambda text, c=combination: f"{c}: {text}"
            )
    assert num_trained >= 8 and num_refused >= 8


def test_the_page_is_the_one_that_the_settings_make():
    written = (Path(__file__).parents[3] / "docs/pairs.md").read_text(encoding="utf-8")
    assert written == page(), "python -m tests.loop.trainer.pairs > docs/pairs.md"
