"""TRL's GRPO losses, run by the peers' interpreter: a line of settings, logprobs and credit in, a line of loss and gradient out.

The trainer's own `_compute_loss` computes them, in float64. It is called on a stand-in for the trainer, which has the settings of the
line and, for the network's logprobs, those of the line.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOTrainer  # ty: ignore[import-not-found]

# B answers of at most T tokens


def loss_of(request: dict[str, Any]) -> dict[str, Any]:
    own_BT, old_BT, reference_BT = (
        torch.tensor(request[name], dtype=torch.float64) for name in ("logprobs", "behaviour", "reference")
    )
    own_BT.requires_grad_()
    lengths_B = torch.tensor(request["lengths"])
    mask_BT = (torch.arange(own_BT.shape[1]) < lengths_B[:, None]).long()
    inputs = {
        "prompt_ids": torch.ones(len(mask_BT), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(mask_BT), 1, dtype=torch.long),
        "completion_ids": torch.ones_like(mask_BT),
        "completion_mask": mask_BT,
        "advantages": torch.tensor(request["credit"], dtype=torch.float64),
        "old_per_token_logps": old_BT,
        "ref_per_token_logps": reference_BT,
        "num_items_in_batch": mask_BT.sum().double(),
    }
    loss = GRPOTrainer._compute_loss(stand_in(own_BT, request["settings"]), None, inputs)
    (gradient_BT,) = torch.autograd.grad(loss, own_BT)
    return {"loss": loss.item(), "gradient": gradient_BT.tolist()}


def stand_in(own_BT: torch.Tensor, settings: dict[str, Any]) -> SimpleNamespace:
    """One process, one step, and none of what a setting does not name."""
    alone = SimpleNamespace(
        num_processes=1, gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x
    )
    arguments = SimpleNamespace(
        delta=settings.get("delta"),
        use_bias_correction_kl=settings.get("use_bias_correction_kl", False),
        sapo_temperature_pos=settings.get("sapo_temperature_pos"),
        sapo_temperature_neg=settings.get("sapo_temperature_neg"),
        steps_per_generation=1,
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (own_BT, torch.zeros_like(own_BT), None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        accelerator=alone,
        args=arguments,
        model=SimpleNamespace(training=True),
        loss_type=settings["loss_type"],
        importance_sampling_level=settings.get("importance_sampling_level", "token"),
        epsilon_low=settings.get("epsilon_low"),
        epsilon_high=settings.get("epsilon_high"),
        beta=settings.get("beta", 0.0),
        off_policy_mask_threshold=settings.get("off_policy_mask_threshold"),
        max_completion_length=settings.get("max_completion_length"),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )


def main() -> None:
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    torch.set_num_threads(json.loads(sys.argv[1])["threads"])
    print(json.dumps({}), file=lines, flush=True)
    for line in sys.stdin:
        print(json.dumps(loss_of(json.loads(line))), file=lines, flush=True)


if __name__ == "__main__":
    main()
