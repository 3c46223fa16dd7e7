"""What agreement to the bit costs on the toy: forward and backward of packed trees in aligned and in fast numerics."""

from __future__ import annotations

from collections.abc import Callable

from everlong.cli.bench import Row
from everlong.cli.benches.timing import interleaved

NUM_TREES, PROMPT, BRANCHES, BRANCH = 4, 120, 8, 80


def measure() -> list[Row]:
    from everlong.models.numerics import Numerics

    steps = {numerics: _step(numerics) for numerics in Numerics}
    aligned, fast = interleaved(steps[Numerics.ALIGNED], steps[Numerics.FAST])
    tokens = NUM_TREES * (PROMPT + BRANCHES * BRANCH)
    ours, reference = tokens / aligned, tokens / fast
    return [Row("forward and backward", "tokens_per_s", "1/s", ours, "fast numerics", reference, ours / reference)]


def _step(numerics) -> Callable[[], None]:
    import torch

    from everlong.models.attention import TreeAttention
    from everlong.models.head import token_logprobs
    from everlong.models.toy import build_toy

    model = build_toy(0, numerics=numerics)
    segments: list[tuple[int, int, int]] = []
    start = 0
    for _ in range(NUM_TREES):
        root = len(segments)
        segments.append((-1, start, PROMPT))
        start += PROMPT
        for _ in range(BRANCHES):
            segments.append((root, start, BRANCH))
            start += BRANCH
    positions = torch.cat([torch.arange(n) + (0 if parent < 0 else PROMPT) for parent, _, n in segments])
    ids = torch.randint(0, 256, (start,), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        attend = TreeAttention(segments, model.config.head_dim**-0.5, numerics)
        hidden = model(ids, positions, attend)
        logprobs, _ = token_logprobs(hidden, model.head_weight, model.config, ids, torch.ones(start), None, numerics)
        logprobs.sum().backward()

    return step
