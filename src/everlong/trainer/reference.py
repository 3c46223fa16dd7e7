"""The policy that a KL term pulls to: the weights before the first batch that a policy sampled, kept in the object store.

So supervised warm-up comes before it, and a resumed run finds the same one. It needs no second network: where it is asked,
its weights change places with the model's, tensor by tensor. Of a model with adapters these alone do: before anything has
trained their B is 0, so the reference is the frozen policy, adapters off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from safetensors.torch import load, save
from torch import Tensor

from everlong.contracts.errors import AlreadyExists, NotFound
from everlong.contracts.ports import ObjectStore
from everlong.models.llama.model import Llama

KEY = "reference/policy.safetensors"
R = TypeVar("R")


class ReferencePolicy:
    def __init__(self, model: Llama, store: ObjectStore) -> None:
        self._model, self._store = model, store
        self._weights: dict[str, Tensor] | None = None

    def ask(self, question: Callable[[], R]) -> R:
        """What `question` answers while the model holds the reference's weights, which afterwards has its own again, to the
        bit. The first question of a run makes the present weights the reference. Raises StoreError."""
        if self._weights is None:
            self._weights = self._find_or_make()
        self._exchange(self._weights)
        try:
            return question()
        finally:
            self._exchange(self._weights)

    def _find_or_make(self) -> dict[str, Tensor]:
        try:
            return self._checked(load(self._store.get(KEY)))
        except NotFound:
            weights = {name: weight.detach().clone() for name, weight in self._model.trained_weights().items()}
        try:
            self._store.create(KEY, save(weights))
        except AlreadyExists:
            return self._checked(load(self._store.get(KEY)))
        return weights

    def _checked(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        own = self._model.trained_weights()
        if own.keys() != weights.keys() or any(
            (own[name].shape, own[name].dtype) != (weights[name].shape, weights[name].dtype) for name in own
        ):
            raise ValueError(f"{KEY} is of another model: give each run a store of its own")
        return weights

    @torch.no_grad()
    def _exchange(self, weights: dict[str, Tensor]) -> None:
        for name, mine in self._model.trained_weights().items():
            theirs = mine.detach().clone()
            mine.copy_(weights[name])
            weights[name] = theirs
