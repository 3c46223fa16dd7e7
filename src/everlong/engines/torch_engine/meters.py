"""What an engine counts: sums since it was made."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from everlong.engines.torch_engine.runner import StepResult
from everlong.engines.torch_engine.scheduler import Work


@dataclass(slots=True)
class Meters:
    steps: int = 0
    tokens_computed: int = 0
    tokens_sampled: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    prefill_s: float = 0.0
    """Steps in which a prompt chunk was computed, whoever decoded beside it."""
    decode_s: float = 0.0
    sample_s: float = 0.0

    def count_step(self, works: Ordered[Work], result: StepResult) -> None:
        self.steps += 1
        self.tokens_computed += sum(work.count for work in works)
        self.tokens_sampled += sum(work.samples for work in works)
        self.sample_s += result.sample_s
        if any(work.count > 1 for work in works):
            self.prefill_s += result.forward_s
        else:
            self.decode_s += result.forward_s

    def count_reply(self, num_prompt: int, num_cached: int) -> None:
        self.prompt_tokens += num_prompt
        self.prefix_hit_tokens += num_cached

    def values(self) -> dict[str, float]:
        return {
            "steps": self.steps,
            "tokens_computed": self.tokens_computed,
            "tokens_sampled": self.tokens_sampled,
            "prompt_tokens": self.prompt_tokens,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "batch_size_mean": self.tokens_sampled / self.steps if self.steps else 0.0,
            "prefill_s": self.prefill_s,
            "decode_s": self.decode_s,
            "sample_s": self.sample_s,
            "busy_s": self.prefill_s + self.decode_s + self.sample_s,
        }
