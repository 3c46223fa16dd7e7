"""What truncated sampling does to a ratio, and what its replay undoes, from one token to a batch."""

import math

import numpy as np
import pytest
import torch
from tests.unit.models.test_head import score
from tests.unit.trainer.test_policy_trainer import PROMPT, batch_of, sample_as_an_engine_would, trainer_of
from tests.unit.trainer.tiny import SHAPE, tiny

from everlong.contracts.tokens import KeptSets
from everlong.models.head import logits_of, processed_log_softmax
from everlong.models.numerics import Numerics
from everlong.models.tree_pass import read_states
from everlong.trainer.config import ReinforceConfig
from everlong.trainer.losses import Tokens, surrogate

ENGINE = [-0.641854, -1.152680, -1.845827]
"""Logprobs of (.5, .3, .15) out of (.5, .3, .15, .05) at top-p 0.9, which keeps the first three."""


def log_ratios(probabilities, labels, kept):
    logits = torch.tensor([probabilities] * len(labels)).log()
    rows = None if kept is None else (kept * len(labels), [len(kept) * i for i in range(len(labels) + 1)])
    logprobs, _ = score(logits, labels, [1.0] * len(labels), rows)
    return (logprobs - torch.tensor([ENGINE[label] for label in labels])).tolist()


def test_without_its_kept_set_every_ratio_is_the_kept_mass_and_with_it_1():
    same = [0.5, 0.3, 0.15, 0.05]
    assert log_ratios(same, [0, 1, 2], [0, 1, 2]) == pytest.approx([0.0] * 3, abs=1e-6)
    without = log_ratios(same, [0, 1, 2], None)
    assert without == pytest.approx([-0.051293] * 3, abs=1e-6)
    assert math.exp(100 * without[0]) == pytest.approx(0.0059, abs=1e-4), "over 100 tokens"


def test_a_recorded_set_gives_the_ratio_where_the_trainer_has_moved():
    moved = [0.6, 0.31, 0.07, 0.02]
    assert math.exp(log_ratios(moved, [2], [0, 1, 2])[0]) == pytest.approx(0.452381, abs=1e-6)
    assert math.exp(log_ratios(moved, [2], None)[0]) == pytest.approx(0.443333, abs=1e-6), "not renormalised"


def test_temperature_on_one_side_only_would_show():
    logits = torch.tensor([[2.0, 0.0, -1.0]] * 2)
    engine, _ = score(logits, [0, 1], [0.5, 0.5])
    trainer, _ = score(logits, [0, 1], [0.5, 0.5])
    raw, _ = score(logits, [0, 1], [1.0, 1.0])
    assert (trainer - engine).exp().tolist() == [1.0, 1.0]
    assert (raw - engine).exp().tolist() == pytest.approx([0.861341, 6.364496], abs=1e-5)


def test_pushing_a_tail_token_away_lifts_the_likeliest_one():
    """Which lowers the entropy step by step; truncated sampling never meets such a token."""
    logits = torch.tensor([[0.7, 0.295, 0.005]]).log().requires_grad_()
    logprobs, _ = score(logits, [2], [1.0])
    terms = surrogate(Tokens(logprobs, torch.zeros(1), torch.tensor([-1.0])), ReinforceConfig())
    (gradient,) = torch.autograd.grad(terms.loss_T.sum(), logits)
    assert (-gradient[0]).tolist() == pytest.approx([0.7, 0.295, -0.995], abs=1e-6)


@torch.no_grad()
def log_kept_masses(model, micro_batch):
    """Of every trained token: log of what its kept set holds of the untruncated distribution."""
    columns = micro_batch.columns
    tokens = np.flatnonzero(columns.trainable)
    (hidden,) = read_states(model, (), micro_batch, tokens - 1, lambda hidden_NM, _: (hidden_NM,))
    logits = logits_of(hidden, model.head_weight, SHAPE, model.numerics)
    whole = processed_log_softmax(logits, torch.from_numpy(columns.temperatures[tokens]), None)
    rows = [torch.from_numpy(columns.kept.row(token).astype(np.int64)) for token in tokens]
    return [float(whole[place, row].logsumexp(0)) for place, row in enumerate(rows)]


async def test_at_staleness_0_the_log_ratio_is_that_of_the_kept_mass_without_replay_and_0_with_it():
    model = tiny(numerics=Numerics.ALIGNED)
    (answer,) = sample_as_an_engine_would(model, [[4, 1, 7, 7, 10, 2]], temperature=0.9, top_p=0.6)
    answer = answer.with_credit(1.0)
    blind = answer.replace(kept=KeptSets.empty(len(answer)))
    masses = log_kept_masses(model, batch_of(0, answer).micro_batches[0])
    assert len(PROMPT) == 3 and min(masses) < -0.1
    with_replay = (await trainer_of(tiny(numerics=Numerics.ALIGNED)).train(batch_of(0, answer))).metrics
    without = (await trainer_of(tiny(numerics=Numerics.ALIGNED)).train(batch_of(0, blind))).metrics
    assert with_replay["mismatch/max"] == 0.0
    assert without["mismatch/mean"] == pytest.approx(-np.mean(masses), abs=1e-5)
    assert without["mismatch/max"] == pytest.approx(-min(masses), abs=1e-5)
    assert without["ratio/mean"] == pytest.approx(np.mean(np.exp(masses)), abs=1e-5)
