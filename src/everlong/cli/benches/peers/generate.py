"""Hugging Face `generate`, run by the peers' interpreter: a line of prompts in, a line of seconds and tokens out.

Its best setup here: cache on, prompts of one length (no padding), inference mode, and of the two attentions the one that is
faster in a short trial. The scores that `generate` returns give what our engine records: logprobs and kept sets.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def generate(model, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    ids = torch.tensor(prompts)
    began, cpu_began = time.perf_counter(), time.process_time()
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_p=0.95, top_k=0,
            max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0, use_cache=True, return_dict_in_generate=True,
            output_scores=True,
        )  # fmt: skip
        sampled = out.sequences[:, ids.shape[1] :]
        records = [_record(scores, sampled[:, step]) for step, scores in enumerate(out.scores)]
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    assert all(len(logprobs) == len(prompts) for logprobs, _ in records)
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": sampled.numel()}


def _record(scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs of the sampled ids, and (row, id) of what top-p kept."""
    return scores.log_softmax(-1).gather(-1, ids[:, None])[:, 0], torch.isfinite(scores).nonzero()


def faster_attention(model, prompt: list[int]) -> str:
    seconds = {}
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        generate(model, [prompt] * 4, 2)
        seconds[name] = min(generate(model, [prompt] * 4, 8)["seconds"] for _ in range(2))
    return min(seconds, key=seconds.__getitem__)


def main() -> None:
    job = json.loads(sys.argv[1])
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16).eval()
    attention = faster_attention(model, job["prompt"])
    model.set_attn_implementation(attention)
    print(json.dumps({"attention": attention}), file=lines, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(generate(model, request["prompts"], request["new_tokens"])), file=lines, flush=True)


if __name__ == "__main__":
    main()
