"""What is watched, or changed, inside the passes that make a gradient."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from everlong.models.attention import PassAttention, TreeAttention
from everlong.models.llama.model import Attend, Llama
from everlong.trainer.gradient_clamp import HiddenGradientClamp

# L layers, H query heads


class HighestLogits:
    """Highest attention logit of every head, float32 [L, H], over all tokens of a step that pass here."""

    def __init__(self, num_layers: int, num_heads: int) -> None:
        self.highest_LH = torch.full((num_layers, num_heads), -torch.inf)

    def meet(self, layer: int, highest_H: Tensor) -> None:
        self.highest_LH[layer] = torch.maximum(self.highest_LH[layer], highest_H)


@dataclass(frozen=True, slots=True)
class Taps:
    """None where nobody asked."""

    clamp: HiddenGradientClamp | None = None
    logits: HighestLogits | None = None

    def before_attention(self, layer: int, q_THD: Tensor, k_TGD: Tensor, attend: Attend) -> None:
        if self.logits is not None:
            assert isinstance(attend, PassAttention | TreeAttention), "the trainer's passes go over trees"
            self.logits.meet(layer, attend.highest_logits(layer, q_THD.detach(), k_TGD.detach()))

    def after_layer(self, layer: int, hidden_TM: Tensor) -> Tensor:
        return hidden_TM if self.clamp is None else self.clamp(layer, hidden_TM)


@contextmanager
def tapped(model: Llama, taps: Taps) -> Generator[None]:
    """Within, the model's passes go through the taps, forward and backward."""
    model.tap = taps
    try:
        yield
    finally:
        model.tap = None
