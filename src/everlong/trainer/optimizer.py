"""Float32 masters and what steps them, with the whole gradient clipped to a norm that is computed in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from everlong.models.llama.model import Llama
from everlong.trainer.gradient_sum import Gradient
from everlong.trainer.muon import muon_step
from everlong.trainer.optimizer_config import AnyOptimizer, MuonConfig


class Stepped(Protocol):
    """A network that an optimiser steps."""

    def trained_weights(self) -> Mapping[str, Tensor]:
        """By name, in a fixed order."""
        ...


class MasterOptimizer:
    """Holds the masters and their moments, of what trains alone. Where the model's weights are float32 they are the masters
    themselves.

    With Muon the matrices inside the layers have a momentum, and everything else AdamW's moments.
    """

    def __init__(self, model: Stepped, config: AnyOptimizer, whose: str = "the gradient") -> None:
        """`whose` gradient it is that an error speaks of."""
        self._config, self._whose = config, whose
        self._weights = {name: weight.detach() for name, weight in model.trained_weights().items()}
        self._masters = {name: torch.nn.Parameter(weight.float()) for name, weight in self._weights.items()}
        self._blocks = _muon_blocks(model, config)
        self._momenta = {name: torch.zeros_like(self._masters[name].detach()) for name in self._blocks}
        others = [master for name, master in self._masters.items() if name not in self._blocks]
        decayed = [master for master in others if master.ndim > 1]
        plain = [master for master in others if master.ndim <= 1]
        self._adamw = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Masters from the model's weights, moments and count at zero."""
        for name, master in self._masters.items():
            master.copy_(self._weights[name])
            if name in self._momenta:
                self._momenta[name].zero_()
                continue
            self._adamw.state[master] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    @torch.no_grad()
    def step(self, gradient: Gradient, num_batches: int, learning_rate: float) -> float:
        """One update of batch `num_batches`; returns the gradient's norm before clipping.

        Raises FloatingPointError, and changes nothing, where the norm is not finite.
        """
        norm = gradient_norm(gradient)
        if not norm < float("inf"):
            raise FloatingPointError(
                f"{self._whose} of batch {num_batches} has norm {norm}: the update was not made and training stops; resume "
                "from the last checkpoint with a lower learning rate"
            )
        limit = self._config.max_grad_norm
        if limit is not None and norm > limit:
            for part in gradient:
                part.mul_(limit / norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        for (name, master), part in zip(self._masters.items(), gradient, strict=True):
            if name in self._momenta:
                assert isinstance(self._config, MuonConfig)
                muon_step(master, self._momenta[name], part, self._blocks[name], learning_rate, self._config)
            else:
                master.grad = part
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._publish()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Everything the next update depends on: `master/` plus the name, and `momentum/` or `exp_avg/`, `exp_avg_sq/`, `step/`."""
        state = {f"master/{name}": master.detach() for name, master in self._masters.items()}
        state |= {f"momentum/{name}": momentum for name, momentum in self._momenta.items()}
        for name, master in self._masters.items():
            if name not in self._momenta:
                state |= {f"{kind}/{name}": value for kind, value in self._adamw.state[master].items()}
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError, and changes nothing, unless the state is of this model and this optimiser."""
        own = self.state()
        if own.keys() != state.keys() or any(own[name].shape != state[name].shape for name in own):
            raise ValueError(
                "the checkpoint is of another model or another optimiser: resume with those that the run was started with"
            )
        for name, target in own.items():
            target.copy_(state[name])
        self._publish()

    @torch.no_grad()
    def adopt(self, weights: Mapping[str, Tensor]) -> None:
        """Take up the model's weights from elsewhere, by name, each in its own dtype. A master whose rounding is the weight stays,
        every other becomes it; moments stay."""
        for name, master in self._masters.items():
            weight = weights[name]
            same = _bits(master.to(weight.dtype)) == _bits(weight)
            master.copy_(torch.where(same, master, weight.float()))
        self._publish()

    def _publish(self) -> None:
        """Round the masters into the model's weights; nothing to do where they are one."""
        for name, weight in self._weights.items():
            if weight.dtype != torch.float32:
                weight.copy_(self._masters[name])


def _bits(weight: Tensor) -> Tensor:
    return weight.view(torch.int32 if weight.dtype == torch.float32 else torch.int16)


HEADED = ("q_proj", "k_proj", "v_proj")
"""Projections whose rows are heads."""


def _muon_blocks(model: Stepped, config: AnyOptimizer) -> dict[str, tuple[int, ...]]:
    """Rows of the blocks of every matrix that Muon steps, by name: those inside the layers, none of AdamW's."""
    if not isinstance(config, MuonConfig):
        return {}
    assert isinstance(model, Llama) and model.adapters is None, "refused with the run's settings"
    blocks = {}
    for name, weight in model.named_weights().items():
        if weight.ndim == 2 and ".layers." in name:
            headed = config.per_head and any(part in name for part in HEADED)
            rows = model.config.head_dim if headed else len(weight)
            blocks[name] = (rows,) * (len(weight) // rows)
    return blocks


def learning_rate(config: AnyOptimizer, num_batches: int, *, supervised: bool = False) -> float:
    """Of the batch after `num_batches` others: linear from the first of `warmup_batches`, then constant.

    `supervised`: the policy sampled none of its tokens.
    """
    full = config.learning_rate
    if supervised and config.supervised_learning_rate is not None:
        full = config.supervised_learning_rate
    return full * min(1.0, (num_batches + 1) / max(1, config.warmup_batches))


def gradient_norm(gradient: Gradient) -> float:
    """Euclidean over all tensors, in float64, summed in the order of the parameters."""
    total = 0.0
    for part in gradient:
        total += float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
    return total**0.5
