"""A network that says of every state what return follows: a trunk with the policy's shape, and a head of one number."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from everlong.contracts.records import MicroBatch
from everlong.models.llama.model import Llama
from everlong.models.numerics import widened
from everlong.models.tree_pass import read_states

# T tokens, M model width

HEAD = "value_head."


class ValueNetwork:
    """V = head(hidden state), or low + (high - low) sigmoid(head) between bounds (arXiv:2608.23566), in float32.

    The head starts at 0 with a bias, so that every state has the same value.
    """

    def __init__(self, policy: Llama, initial: float = 0.0, bounds: tuple[float, float] | None = None) -> None:
        """The trunk begins with the policy's weights and shares those that are frozen. `initial` is the bias."""
        self.trunk, self._initial, self._bounds = policy.twin(), initial, bounds
        self._weight_M = nn.Parameter(torch.zeros(policy.config.hidden_size))
        self._bias = nn.Parameter(torch.full((1,), initial))

    def trained_weights(self) -> dict[str, Tensor]:
        """The trunk's, without a head over tokens that is no part of it, and the head's."""
        tied = self.trunk.config.tie_embeddings
        trunk = {name: w for name, w in self.trunk.trained_weights().items() if tied or w is not self.trunk.head_weight}
        return {**trunk, f"{HEAD}weight": self._weight_M, f"{HEAD}bias": self._bias}

    @torch.no_grad()
    def start_from(self, policy: Llama) -> None:
        """Copy the policy's weights as they are into the trunk, and forget what the head has learnt."""
        self.trunk.load_trained_weights({name: w.detach() for name, w in policy.trained_weights().items()})
        self._weight_M.zero_()
        self._bias.fill_(self._initial)

    def read(self, micro_batch: MicroBatch, tokens_R: np.ndarray) -> Tensor:
        """float32 [R], of the states that the tokens lead to."""
        weights = list(self.trained_weights().values())
        return read_states(self.trunk, weights, micro_batch, tokens_R, lambda hidden, _: (self.values(hidden),))[0]

    def values(self, hidden_TM: Tensor) -> Tensor:
        """float32 [T], of the states that the trunk's hidden states stand for; a row depends on that row alone."""
        raw_T = (widened(hidden_TM) * self._weight_M).sum(-1) + self._bias
        if self._bounds is None:
            return raw_T
        low, high = self._bounds
        return low + (high - low) * torch.sigmoid(raw_T)
