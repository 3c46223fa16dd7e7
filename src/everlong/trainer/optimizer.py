"""Float32 masters and what steps them, with the whole gradient clipped to a norm that is computed in a fixed order.

Over several ranks each tensor is stepped, and its master and moments are held, by the one that owns it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from everlong.models.llama.checkpoint_names import projection_name
from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.trainer.muon import muon_step
from everlong.trainer.optimizer_config import AnyOptimizer, MuonConfig
from everlong.trainer.qk_clip import qk_clip_factors, scale_heads
from everlong.trainer.ranks.ranks import ALONE, OwnedGradient, Ranks, owners_of


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

    def __init__(self, model: Stepped, config: AnyOptimizer, whose: str = "the gradient", ranks: Ranks = ALONE) -> None:
        """`whose` gradient it is that an error speaks of."""
        self._config, self._whose, self._ranks = config, whose, ranks
        self._weights = {name: weight.detach() for name, weight in model.trained_weights().items()}
        self.owners = owners_of([weight.numel() for weight in self._weights.values()], ranks.size)
        """Rank of each trained weight, in their order."""
        mine = [name for name, owner in zip(self._weights, self.owners, strict=True) if owner == ranks.rank]
        self._masters = {name: torch.nn.Parameter(self._weights[name].float()) for name in mine}
        self._blocks = _muon_blocks(model, config)
        self._num_kv_heads = model.config.num_kv_heads if isinstance(model, Llama) else 0
        self._momenta = {
            name: torch.zeros_like(m.detach()) for name, m in self._masters.items() if name in self._blocks
        }
        self._num_steps = torch.zeros((), dtype=torch.int64)
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

    @property
    def num_steps(self) -> int:
        """Made since the run's start; schedules count them."""
        return int(self._num_steps)

    @torch.no_grad()
    def reset(self) -> None:
        """Masters from the model's weights, moments and counts at zero."""
        self._num_steps.zero_()
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
    def step(
        self,
        gradient: OwnedGradient,
        num_batches: int,
        learning_rate: float,
        highest_logits_LH: Tensor | None = None,
    ) -> float:
        """One update of batch `num_batches`; returns the gradient's norm before clipping.

        `highest_logits_LH`: attention logits of every layer and head that the gradient's pass met, where they are bounded.
        Raises FloatingPointError, and changes nothing, where the norm is not finite.
        """
        norm = gradient_norm(gradient, self._ranks)
        if not norm < float("inf"):
            raise FloatingPointError(
                f"{self._whose} of batch {num_batches} has norm {norm}: the update was not made and training stops; resume "
                "from the last checkpoint with a lower learning rate"
            )
        limit = self._config.max_grad_norm
        parts = dict(zip(self._weights, gradient, strict=True))
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        for name, master in self._masters.items():
            part = parts[name]
            assert part is not None, "whoever owns a tensor has its gradient"
            if limit is not None and norm > limit:
                part.mul_(limit / norm)
            if name in self._momenta:
                assert isinstance(self._config, MuonConfig)
                muon_step(master, self._momenta[name], part, self._blocks[name], learning_rate, self._config)
            else:
                master.grad = part
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        if highest_logits_LH is not None:
            self._clip_heads(highest_logits_LH)
        self._num_steps += 1
        self._publish()
        return norm

    def _clip_heads(self, highest_LH: Tensor) -> None:
        """QK-clip of the masters that are held here."""
        assert isinstance(self._config, MuonConfig) and self._config.qk_clip is not None
        for layer, highest_H in enumerate(highest_LH):
            query, key = (f"{projection_name(layer, name)}.weight" for name in ("q_proj", "k_proj"))
            factors = qk_clip_factors(highest_H, self._config.qk_clip, self._num_kv_heads)
            for name, factors_H in zip((query, key), factors, strict=True):
                if name in self._masters:
                    scale_heads(self._masters[name], factors_H)

    def state(self) -> dict[str, Tensor]:
        """Everything the next update depends on: `num_steps`, `master/` plus the name, and `momentum/` or `exp_avg/`, `exp_avg_sq/`,
        `step/`. Over several ranks what is held here."""
        state = {"num_steps": self._num_steps}
        state |= {f"master/{name}": master.detach() for name, master in self._masters.items()}
        state |= {f"momentum/{name}": momentum for name, momentum in self._momenta.items()}
        for name, master in self._masters.items():
            if name not in self._momenta:
                state |= {f"{kind}/{name}": value for kind, value in self._adamw.state[master].items()}
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Of all ranks. Raises ValueError, and changes nothing, unless the state is of this model and this optimiser."""
        if {name: tensor.shape for name, tensor in state.items()} != self._layout():
            raise ValueError(
                "the checkpoint is of another model or another optimiser: resume with those that the run was started with"
            )
        for name, target in self.state().items():
            target.copy_(state[name])
        for name, weight in self._weights.items():
            if name not in self._masters or weight.dtype != torch.float32:
                weight.copy_(state[f"master/{name}"])

    def _layout(self) -> dict[str, torch.Size]:
        """Shapes of the state of all ranks."""
        layout = {"num_steps": torch.Size()}
        for name, weight in self._weights.items():
            moments = ("momentum",) if name in self._blocks else ("exp_avg", "exp_avg_sq")
            layout |= {f"{kind}/{name}": weight.shape for kind in ("master", *moments)}
            if name not in self._blocks:
                layout[f"step/{name}"] = torch.Size()
        return layout

    @torch.no_grad()
    def adopt(self, weights: Mapping[str, Tensor]) -> None:
        """Take up the model's weights from elsewhere, by name, each in its own dtype. A master whose rounding is the weight stays,
        every other becomes it; moments stay."""
        for name, own in self._weights.items():
            weight, master = weights[name], self._masters.get(name)
            if master is not None:
                same = _bits(master.to(weight.dtype)) == _bits(weight)
                master.copy_(torch.where(same, master, weight.float()))
            own.copy_(weight)

    def _publish(self) -> None:
        """Round the masters into the model's weights, where they are not one, and those of every rank into everybody's."""
        for name, master in self._masters.items():
            if self._weights[name].dtype != torch.float32:
                self._weights[name].copy_(master)
        self._ranks.spread([*self._weights.values()], self.owners)


def _bits(weight: Tensor) -> Tensor:
    return weight.view(torch.int32 if weight.dtype == torch.float32 else torch.int16)


HEADED = ("q_proj", "k_proj", "v_proj", "qkv_proj")
"""Projections whose rows are heads."""


def _muon_blocks(model: Stepped, config: AnyOptimizer) -> dict[str, tuple[int, ...]]:
    """Rows of the blocks of every matrix that Muon steps, by name: those inside the layers, none of AdamW's."""
    if not isinstance(config, MuonConfig):
        return {}
    assert isinstance(model, Llama) and model.adapters is None, "refused with the run's settings"
    return {
        name: block_rows(name, weight.shape[-2], model.config, per_head=config.per_head)
        for name, weight in model.named_weights().items()
        if weight.ndim >= 2 and ".layers." in name
    }


def block_rows(name: str, rows: int, shape: LlamaConfig, *, per_head: bool) -> tuple[int, ...]:
    """How a weight of so many rows is cut: by its heads, or by the projections that it fuses (`qkv_proj`, `gate_up_proj`)."""
    if per_head and any(part in name for part in HEADED):
        return (shape.head_dim,) * (rows // shape.head_dim)
    if "qkv_proj" in name:
        return tuple(heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads))
    return (rows // 2,) * 2 if "gate_up_proj" in name else (rows,)


def learning_rate(config: AnyOptimizer, num_steps: int, *, supervised: bool = False) -> float:
    """Of the step after `num_steps` others: linear from the first of `warmup_steps`, then constant.

    `supervised`: the policy sampled none of its tokens.
    """
    full = config.learning_rate
    if supervised and config.supervised_learning_rate is not None:
        full = config.supervised_learning_rate
    return full * min(1.0, (num_steps + 1) / max(1, config.warmup_steps))


def gradient_norm(gradient: OwnedGradient, ranks: Ranks = ALONE) -> float:
    """Euclidean over all tensors of all ranks, in float64, summed in the order of the parameters."""
    own = {
        place: float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
        for place, part in enumerate(gradient)
        if part is not None
    }
    squares = {place: square for found in ranks.gather(own) for place, square in found.items()}
    return sum(squares[place] for place in range(len(gradient))) ** 0.5
