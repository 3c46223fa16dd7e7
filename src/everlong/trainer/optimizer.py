"""AdamW on float32 masters, with the whole gradient clipped to a norm that is computed in a fixed order."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from everlong.models.llama.model import Llama
from everlong.trainer.config import OptimizerConfig
from everlong.trainer.gradient_sum import Gradient


class MasterOptimizer:
    """Holds the masters and their moments. Where the model's weights are float32 they are the masters themselves."""

    def __init__(self, model: Llama, config: OptimizerConfig) -> None:
        self._config = config
        self._weights = {name: weight.detach() for name, weight in model.named_weights().items()}
        self._masters = {name: torch.nn.Parameter(weight.float()) for name, weight in self._weights.items()}
        decayed = [master for master in self._masters.values() if master.ndim > 1]
        plain = [master for master in self._masters.values() if master.ndim <= 1]
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
                f"the gradient of batch {num_batches} has norm {norm}: the update was not made and training stops; resume "
                "from the last checkpoint with a lower learning rate"
            )
        limit = self._config.max_grad_norm
        if limit is not None and norm > limit:
            for part in gradient:
                part.mul_(limit / norm)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        for master, part in zip(self._masters.values(), gradient, strict=True):
            master.grad = part
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._publish()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Everything the next update depends on, under `master/`, `exp_avg/`, `exp_avg_sq/` and `step/` plus the name."""
        state = {f"master/{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            state |= {f"{kind}/{name}": value for kind, value in self._adamw.state[master].items()}
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Raises ValueError, and changes nothing, unless the state is of this model."""
        own = self.state()
        if own.keys() != state.keys() or any(own[name].shape != state[name].shape for name in own):
            raise ValueError("the checkpoint is of another model: resume with the model that the run was started with")
        for name, target in own.items():
            target.copy_(state[name])
        self._publish()

    def _publish(self) -> None:
        """Round the masters into the model's weights; nothing to do where they are one."""
        for name, weight in self._weights.items():
            if weight.dtype != torch.float32:
                weight.copy_(self._masters[name])


def learning_rate(config: OptimizerConfig, num_batches: int, *, supervised: bool = False) -> float:
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
