"""What the network decided for every token that stands in the key-value cache, at the same slots.

A prompt that is found in the prefix cache goes through no network, so its decisions must be found where its keys are.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from everlong.contracts.decisions import Decisions, DecisionShape, absent_rows

# T tokens of a step, P places in the network, W numbers at each


class DecidedCache:
    def __init__(self, shapes: Mapping[str, DecisionShape], num_slots: int) -> None:
        self._rows = {name: absent_rows(num_slots, shape) for name, shape in shapes.items()}

    def write(self, slots_T: np.ndarray, rows: Mapping[str, Tensor]) -> None:
        """`rows` by name [T, P, W]."""
        for name, cached in self._rows.items():
            cached[slots_T] = rows[name].numpy()

    def read(self, slots_T: np.ndarray) -> Decisions:
        return Decisions(num_tokens=len(slots_T), rows={name: cached[slots_T] for name, cached in self._rows.items()})
