"""From the decisions on a batch's record to the rows that a forward pass replays: which token, checked, and moved to it.

A record has the decisions of a pass at the token that the pass predicted. Where several tokens follow one, as branches do, the
first of them that has a record settles it: a pass is computed once, with one choice.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import Tensor

from everlong.contracts.decisions import ABSENT, Decisions, DecisionShape, absent_rows
from everlong.contracts.records import MicroBatch
from everlong.models.decisions import NOT_CHOSEN
from everlong.models.llama.config import LlamaConfig
from everlong.trainer.replay import predecessors, trained_tokens

# T tokens of the micro-batch, P places in the network, W numbers at each


def replayed_rows(index: int, micro_batch: MicroBatch, model: LlamaConfig, names: Collection[str]) -> dict[str, Tensor]:
    """By name [T, P, W] as a `Replay` takes them, of micro-batch `index`.

    Raises ValueError for rows that are not this model's, and for a trained token that a policy sampled without one: decisions
    are recorded at sampling and never filled in later. Other tokens without a row, such as traces to imitate, have none.
    """
    return {name: _replayed(f"micro-batch {index}", micro_batch, name, model.decisions[name]) for name in names}


def _replayed(where: str, micro_batch: MicroBatch, name: str, shape: DecisionShape) -> Tensor:
    columns = micro_batch.columns
    _check_rows(where, columns.decisions, name, shape)
    known = columns.decisions.known(name)
    bare = np.flatnonzero(columns.sampled & trained_tokens(columns) & ~known)
    if bare.size:
        raise ValueError(
            f"sampled token {bare[0]} of {where} has no {name} on record, and {bare.size - 1} more: they are recorded at sampling "
            "(replay.routes of the run that sampled them), and never filled in later"
        )
    before = predecessors(micro_batch.segments, len(columns))
    tokens = np.flatnonzero(known & (before >= 0))
    settled, first = np.unique(before[tokens], return_index=True)
    rows = absent_rows(len(columns), shape)
    if len(settled):
        rows[settled] = columns.decisions.rows[name][tokens[first]]
    if shape.num_choices is None:
        return torch.from_numpy(rows)
    chosen = rows.astype(np.int64)
    chosen[rows == ABSENT[shape.dtype]] = NOT_CHOSEN
    return torch.from_numpy(chosen)


def _check_rows(where: str, decisions: Decisions, name: str, shape: DecisionShape) -> None:
    rows = decisions.rows.get(name)
    if rows is None:
        return
    if rows.shape[1:] != (shape.places, shape.width) or rows.dtype != shape.dtype:
        raise ValueError(
            f"{name} of {where} are {rows.dtype}{list(rows.shape[1:])} per token, and the model has {shape.dtype}"
            f"{[shape.places, shape.width]}: the episode was sampled with another model"
        )
    known = rows[decisions.known(name)]
    if shape.num_choices is None:
        good = np.isfinite(known)
    else:
        ordered = np.sort(known, axis=-1)
        good = known < shape.num_choices
        good[..., 1:] &= ordered[..., 1:] != ordered[..., :-1]
    if not good.all():
        token = int(np.flatnonzero(decisions.known(name))[np.flatnonzero(~good.all((1, 2)))[0]])
        raise ValueError(
            f"{name} of token {token} of {where} are {rows[token].tolist()}: expected in each of {shape.places} places "
            f"{shape.width} finite numbers, and where they are choices different ones below {shape.num_choices}"
        )
