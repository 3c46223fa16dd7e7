"""TRL's GRPO trainer, run by the peers' interpreter: one step for each line in, a line of seconds and tokens out.

Its best setup here: bfloat16 weights, no reference model (beta 0), one update per batch, no gradient checkpointing, fused
AdamW, no logging. The end-of-sequence token is banned, so that every completion has its full length.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

import torch
from datasets import Dataset  # ty: ignore[import-not-found]
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # ty: ignore[import-not-found]


class Steps(TrainerCallback):
    """Every step waits for a line, and answers when it is done."""

    def __init__(self, lines) -> None:
        self._lines, self._began, self._cpu_began, self.tokens = lines, 0.0, 0.0, 0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if not sys.stdin.readline():
            sys.exit(0)
        self.tokens, self._began, self._cpu_began = 0, time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        seconds, cpu_seconds = time.perf_counter() - self._began, time.process_time() - self._cpu_began
        answer = {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": self.tokens}
        print(json.dumps(answer), file=self._lines, flush=True)


def main() -> None:
    job = json.loads(sys.argv[1])
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    torch.set_num_threads(job["threads"])
    steps, group_size = Steps(lines), job["group_size"]

    def reward(completion_ids: list[list[int]], **kwargs) -> list[float]:
        steps.tokens += sum(len(ids) for ids in completion_ids)
        return [float(attempt % 2) for attempt in range(len(completion_ids))]

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, use_cpu=True, use_vllm=False, per_device_train_batch_size=group_size,
            num_generations=group_size, max_completion_length=job["new_tokens"], max_steps=len(job["prompts"]), beta=0.0,
            num_iterations=1, temperature=1.0, top_p=0.95, generation_kwargs={"min_new_tokens": job["new_tokens"]},
            learning_rate=1e-6, lr_scheduler_type="constant", optim="adamw_torch_fused", bf16=False,
            model_init_kwargs={"dtype": "bfloat16"}, gradient_checkpointing=False, shuffle_dataset=False,
            logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=job["model"],
            args=config,
            reward_funcs=reward,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in job["prompts"]]),
            processing_class=AutoTokenizer.from_pretrained(job["model"]),
            callbacks=[steps],
        )
        print(json.dumps({"prompts": len(job["prompts"])}), file=lines, flush=True)
        trainer.train()


if __name__ == "__main__":
    main()
