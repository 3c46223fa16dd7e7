"""In aligned numerics every way of computing a token's logprob gives the same bits. Whole models, so seconds in all."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from everlong.models.attention import TreeAttention
from everlong.models.head import logits_of, processed_log_softmax, token_logprobs
from everlong.models.llama.model import Llama
from everlong.models.numerics import CausalAttention, Numerics, NumericsUnavailable, self_test
from everlong.models.toy import build_toy

PROMPT, LENGTH = 150, 200


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def machine_can():
    try:
        for count in (1, 2):
            with threads(count):
                self_test()
    except NumericsUnavailable as refusal:
        pytest.skip(str(refusal))


class CachedAttend:
    """An engine's attention in small: B sequences append one or more tokens each to padded keys and values."""

    def __init__(self, model: Llama, batch: int) -> None:
        config = model.config
        self._model, self._batch, self.length = model, batch, 0
        self._kv = torch.zeros(config.num_layers, 2, batch, LENGTH, config.num_kv_heads, config.head_dim)

    def __call__(self, layer, q_THD, k_TGD, v_TGD):
        q, k, v = (t.view(self._batch, -1, *t.shape[1:]) for t in (q_THD, k_TGD, v_TGD))
        end = self.length + q.shape[1]
        self._kv[layer, 0, :, self.length : end], self._kv[layer, 1, :, self.length : end] = k, v
        positions = torch.arange(self.length, end).expand(self._batch, -1)
        keys, values = self._kv[layer]
        out = CausalAttention(positions, q.shape[-1] ** -0.5, self._model.numerics)(q, keys[:, :end], values[:, :end])
        return out.flatten(0, 1)


def sequences(count: int) -> torch.Tensor:
    return torch.randint(0, 260, (count, LENGTH), generator=torch.Generator().manual_seed(4))


def cached(model: Llama, ids_BT: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Log-distributions [B, T, V] from steps of the given sizes."""
    attend, parts = CachedAttend(model, len(ids_BT)), []
    for size in sizes:
        step = ids_BT[:, attend.length : attend.length + size]
        positions = torch.arange(attend.length, attend.length + size).repeat(len(ids_BT))
        parts.append(model(step.flatten(), positions, attend).view(len(ids_BT), size, -1))
        attend.length += size
    hidden = torch.cat(parts, 1).flatten(0, 1)
    logits = logits_of(hidden, model.head_weight, model.config, model.numerics)
    return processed_log_softmax(logits, torch.full((len(hidden),), 0.7), None).view(len(ids_BT), LENGTH, -1)


def trained(model: Llama, ids_T: torch.Tensor, positions: list[int], segments, chunk_tokens: int = 512) -> torch.Tensor:
    """Logprobs that a trainer gets of each token's successor in the flat order."""
    attend = TreeAttention(segments, model.config.head_dim**-0.5, model.numerics)
    hidden = model(ids_T, torch.tensor(positions), attend)
    temperature = torch.full((len(ids_T),), 0.7)
    logprobs, _ = token_logprobs(
        hidden, model.head_weight, model.config, ids_T.roll(-1), temperature, None, model.numerics, chunk_tokens
    )
    return logprobs


def of_successors(log_distributions_TV: torch.Tensor, ids_T: torch.Tensor) -> torch.Tensor:
    return log_distributions_TV[:-1].gather(-1, ids_T[1:, None])[:, 0]


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16_weights"])
def model(request):
    return build_toy(0, request.param, Numerics.ALIGNED)


@pytest.fixture(scope="module")
def prefill(model):
    """All four sequences, each alone, in one step."""
    with torch.no_grad():
        return torch.cat([cached(model, ids[None], [LENGTH]) for ids in sequences(4)])


@torch.no_grad()
@pytest.mark.parametrize(
    "sizes",
    [[PROMPT, *[1] * (LENGTH - PROMPT)], [64, 64, 64, 8], [1, 7, 100, 92]],
    ids=["decode_one_by_one", "chunks_of_64", "ragged_chunks"],
)
def test_cut_of_the_forward_changes_no_bit(model, prefill, sizes):
    assert torch.equal(cached(model, sequences(1), sizes), prefill[:1])


@torch.no_grad()
def test_batch_of_sixteen_changes_no_bit(model, prefill):
    others = sequences(16)
    assert torch.equal(cached(model, others, [PROMPT, *[1] * 5, LENGTH - PROMPT - 5])[:4], prefill)


@torch.no_grad()
def test_second_thread_changes_no_bit(model, prefill):
    with threads(2):
        assert torch.equal(cached(model, sequences(4), [PROMPT, 1, 1, LENGTH - PROMPT - 2]), prefill)


def test_trainer_gets_the_bits_of_the_engine(model, prefill):
    """A forward with gradients over packed sequences, against each alone in the engine's way."""
    ids, segments = sequences(4), [(-1, LENGTH * i, LENGTH) for i in range(4)]
    logprobs = trained(model, ids.flatten(), [*range(LENGTH)] * 4, segments, chunk_tokens=111)
    assert logprobs.requires_grad
    for row in range(4):
        expected = of_successors(prefill[row], ids[row])
        assert torch.equal(logprobs[LENGTH * row : LENGTH * (row + 1) - 1], expected)


def test_tree_gets_the_bits_of_its_branches(model, prefill):
    """Two answers below one prompt, in one forward: the prompt is computed once and neither answer's bits change."""
    ids = sequences(1)[0]
    other = ids.clone()
    other[PROMPT:] = sequences(2)[1, PROMPT:]
    with torch.no_grad():
        expected = of_successors(cached(model, other[None], [LENGTH])[0], other)
    packed = torch.cat([ids, other[PROMPT:]])
    positions = [*range(LENGTH), *range(PROMPT, LENGTH)]
    segments = [(-1, 0, PROMPT), (0, PROMPT, LENGTH - PROMPT), (0, LENGTH, LENGTH - PROMPT)]
    logprobs = trained(model, packed, positions, segments)
    assert torch.equal(logprobs[: LENGTH - 1], of_successors(prefill[0], ids))
    assert torch.equal(logprobs[LENGTH:-1], expected[PROMPT:])


@torch.no_grad()
def test_fast_numerics_agree_closely():
    fast, aligned = (cached(build_toy(0, numerics=mode), sequences(1), [PROMPT, 50]) for mode in Numerics)
    torch.testing.assert_close(fast, aligned, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("numerics", list(Numerics))
def test_gradients_of_a_tree_repeat_to_the_bit_on_two_threads(numerics):
    ids = sequences(6)
    packed = torch.cat([ids[0, :PROMPT], ids[:, PROMPT:].flatten()])
    segments = [(-1, 0, PROMPT), *((0, PROMPT + 50 * i, 50) for i in range(6))]
    positions = [*range(PROMPT), *[*range(PROMPT, LENGTH)] * 6]
    runs = []
    for _ in range(2):
        model = build_toy(0, numerics=numerics)
        with threads(2):
            trained(model, packed, positions, segments, chunk_tokens=100).sum().backward()
        runs.append([weight.grad for weight in model.named_weights().values()])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
