"""What truncated sampling does to the ratio of a policy to itself: the log of the kept mass without replay, nothing with it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tests.study.stale_arm import VOCAB, Arm, Running, without_kept_sets

from everlong.contracts.records import MicroBatch
from everlong.models.checkpoint import load_checkpoint
from everlong.models.head import logits_of, processed_log_softmax
from everlong.models.llama.model import Llama
from everlong.models.tree_pass import read_states
from everlong.trainer.replay import rows_of
from everlong.trainer.scoring import score_micro_batch

REQUIRED = 1e-3
CHUNK = 128


@dataclass(frozen=True, slots=True)
class Ratios:
    num_tokens: int
    mean_log_mass: float
    """Of what the kept sets hold of the untruncated distribution."""
    with_replay: float
    """Largest |log(p/q)|."""
    without_replay: float
    """Largest | log(p/q) - log mass |."""


def ratios_at_staleness_0(checkpoint: Path) -> Ratios:
    """Raises AssertionError where one of them is not what it must be."""
    model = load_checkpoint(checkpoint, vocab_size=VOCAB)
    batch = asyncio.run(Running.sampled(Arm(name="staleness-0", top_p=0.95), checkpoint))
    replayed, blind, masses = [], [], []
    for part, without in zip(batch.micro_batches, without_kept_sets(batch).micro_batches, strict=True):
        tokens = part.columns.trainable
        sampler = part.columns.logprobs[tokens]
        replayed.append(score_micro_batch(model, part, CHUNK)[tokens] - sampler)
        blind.append(score_micro_batch(model, without, CHUNK)[tokens] - sampler)
        masses.append(log_kept_masses(model, part))
    mass = np.concatenate(masses)
    found = Ratios(
        num_tokens=len(mass),
        mean_log_mass=float(mass.mean()),
        with_replay=float(np.abs(np.concatenate(replayed)).max()),
        without_replay=float(np.abs(np.concatenate(blind) - mass).max()),
    )
    assert max(found.with_replay, found.without_replay) < REQUIRED and found.mean_log_mass < -REQUIRED, found
    return found


@torch.no_grad()
def log_kept_masses(model: Llama, micro_batch: MicroBatch) -> np.ndarray:
    """float64, of every trained token; 0 for one whose set is the whole vocabulary."""
    columns, rows = micro_batch.columns, rows_of(micro_batch, micro_batch.columns.trainable)
    (hidden_RM,) = read_states(model, (), micro_batch, rows.predecessors_R.numpy(), lambda hidden_NM, _: (hidden_NM,))
    logits_RV = logits_of(hidden_RM, model.head_weight, model.config, model.numerics)
    logprobs_RV = processed_log_softmax(logits_RV, rows.temperatures_R, None).double()
    kept = [torch.from_numpy(columns.kept.row(token).astype(np.int64)) for token in rows.tokens]
    return np.array([float(logprobs_RV[r, row].logsumexp(0)) if len(row) else 0.0 for r, row in enumerate(kept)])
