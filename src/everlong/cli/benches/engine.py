"""Sampled tokens per second of the embedded engine against Hugging Face `generate`: SmolLM2-135M, bfloat16, same threads.

Both sample 64 tokens at temperature 1 and top-p 0.95 with logprobs and kept sets, from the same prompts, which are new in
every turn, so that the engine's cache holds nothing of an earlier one. In `16-shared` 16 prompts of 2,048 tokens begin with
the same 1,638, as the turns of a group do. `tokens_per_cpu_s` counts processor time: neighbours hardly enter it.
"""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass

import numpy as np

from everlong.cli.bench import Row
from everlong.cli.benches.peers.process import Peer
from everlong.cli.benches.prompts import Windows
from everlong.cli.benches.smollm2 import open_smollm2
from everlong.cli.benches.timing import Spent, Stopwatch
from everlong.contracts.ports import Engine
from everlong.contracts.records import GenerateRequest, SamplingKey, SamplingParams
from everlong.engines.config import EmbeddedConfig

NEW_TOKENS, TURNS = 64, 3


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_prompts: int
    shared: int
    """Tokens with which all prompts begin."""
    own: int


CASES = (Case("1", 1, 0, 128), Case("16", 16, 0, 128), Case("64", 64, 0, 128), Case("16-shared", 16, 1638, 410))


def measure() -> list[Row]:
    return asyncio.run(_measure(CASES, TURNS))


async def _measure(cases: tuple[Case, ...], turns: int) -> list[Row]:
    cell = await open_smollm2(EmbeddedConfig(max_running=64, cache_tokens=65536))
    windows = Windows(cell.tokenizer)
    job = {"model": str(cell.folder), "prompt": windows.take(128)}
    peer = Peer("generate", job, cell.threads)
    try:
        await _generate(cell.engine, [job["prompt"]])
        return [row for case in cases for row in await _rows(case, turns, windows, cell.engine, peer)]
    finally:
        peer.close()
        await cell.close()


async def _rows(case: Case, turns: int, windows: Windows, engine: Engine, peer: Peer) -> list[Row]:
    ours: list[Spent] = []
    theirs: list[Spent] = []
    num_tokens = case.num_prompts * NEW_TOKENS
    for _ in range(turns):
        shared = windows.take(case.shared)
        prompts = [shared + windows.take(case.own) for _ in range(case.num_prompts)]
        ours.append(await _generate(engine, prompts))
        answer = peer.ask({"prompts": prompts, "new_tokens": NEW_TOKENS})
        assert answer["tokens"] == num_tokens, f"generate stopped early: {answer}"
        theirs.append(Spent(answer["seconds"], answer["cpu_seconds"]))
    return [
        _row(case, "tokens_per_s", *(num_tokens / statistics.median(s.seconds for s in side) for side in (ours, theirs))),
        _row(
            case, "tokens_per_cpu_s",
            *(num_tokens / statistics.median(s.cpu_seconds for s in side) for side in (ours, theirs)),
        ),
    ]  # fmt: skip


def _row(case: Case, metric: str, value: float, reference: float) -> Row:
    return Row(case.name, metric, "1/s", value, "hf-generate", reference, value / reference)


async def _generate(engine: Engine, prompts: list[list[int]]) -> Spent:
    stopwatch = Stopwatch()
    replies = await asyncio.gather(*(engine.generate(request) for request in requests(prompts)))
    spent = stopwatch.read()
    assert all(len(reply.columns) == NEW_TOKENS for reply in replies), "without stops every answer has its full length"
    return spent


def requests(prompts: list[list[int]]) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            request_id=str(number),
            key=SamplingKey(run_seed=0, episode=str(number), turn=0),
            prompt_ids=np.array(prompt, np.int32),
            params=SamplingParams(max_tokens=NEW_TOKENS, top_p=0.95),
        )
        for number, prompt in enumerate(prompts)
    ]
