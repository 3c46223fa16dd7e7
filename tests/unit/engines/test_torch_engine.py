"""The embedded engine: bits, versions, neighbours and failures, on a model of two layers."""

import asyncio

import numpy as np
import pytest
import torch

from everlong.contracts.errors import EngineError
from everlong.contracts.records import FinishReason, GenerateRequest, SamplingKey, SamplingParams
from everlong.engines.config import EmbeddedConfig
from everlong.engines.randomness import stream_of, uniforms
from everlong.engines.torch_engine.engine import TorchEngine
from everlong.models.attention import TreeAttention
from everlong.models.head import token_logprobs
from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.models.numerics import Numerics
from everlong.storage import open_store
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet

VOCAB, CONTEXT = 260, 256
SHAPE = LlamaConfig(
    vocab_size=VOCAB,
    padded_vocab_size=264,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=CONTEXT,
)


def weight_set(version, shape=SHAPE, dtype="float32"):
    random = np.random.default_rng(version)
    tensors = {}
    for name, weight in Llama(shape).named_weights().items():
        values = (random.standard_normal(tuple(weight.shape)) * 0.3).astype(np.float32).view(np.uint32)
        bits = values if dtype == "float32" else (values >> 16).astype(np.uint16)
        tensors[name] = RawTensor(dtype, tuple(weight.shape), bits)
    return WeightSet(version, tensors)


def published(*sets):
    store = open_store("memory://")
    for weights in sets:
        WeightPublisher(store, anchor_every=1).publish(weights, None)
    return WeightReader(store)


@pytest.fixture(scope="module")
def reader():
    return published(weight_set(0), weight_set(1))


def engine_of(reader, *, numerics=Numerics.ALIGNED, lease=None, dtype=torch.float32, **settings):
    config = EmbeddedConfig(**{"block_tokens": 8, "cache_tokens": 4096, **settings})
    model = Llama(SHAPE, dtype=dtype, numerics=numerics)
    token_bytes = [bytes([i % 256]) for i in range(VOCAB)]
    return TorchEngine(model, reader, token_bytes=token_bytes, config=config, lease=lease or asyncio.Lock())


def ask(name="a", num_prompt=40, max_tokens=12, **params):
    """A request whose prompt and random numbers follow from its name."""
    prompt = np.random.default_rng([*name.encode()]).integers(0, VOCAB, num_prompt).astype(np.int32)
    return GenerateRequest(
        request_id=name,
        key=SamplingKey(run_seed=1, episode=name, turn=0),
        prompt_ids=prompt,
        params=SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.7, "top_p": 0.9, **params}),
    )


def neighbours(count):
    """Requests of every kind: long and short, cold and hot, truncated or not."""
    return [
        ask(f"n{i}", 1 + 13 * i % 90, 3 + 5 * i % 17, temperature=0.4 + 0.1 * i, top_k=i % 4, top_p=1 - 0.03 * (i % 7))
        for i in range(count)
    ]


async def answer(engine, *requests, version=0):
    await engine.update(version)
    replies = await asyncio.gather(*[engine.generate(request) for request in requests])
    await engine.close()
    return [reply.columns for reply in replies]


def trainer_logprobs(request, columns):
    """What a training forward over prompt and answer says of each sampled token."""
    model = Llama(SHAPE, numerics=Numerics.ALIGNED)
    model.load_weights({n: torch.from_numpy(raw.bits).view(torch.float32) for n, raw in weight_set(0).tensors.items()})
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, columns.ids])).long()
    attend = TreeAttention([(-1, 0, len(ids))], SHAPE.head_dim**-0.5, Numerics.ALIGNED)
    hidden = model(ids, torch.arange(len(ids)), attend)[len(request.prompt_ids) - 1 : -1]
    kept = torch.from_numpy(columns.kept.ids), torch.from_numpy(columns.kept.offsets)
    temperature = torch.from_numpy(columns.temperatures)
    labels = ids[len(request.prompt_ids) :]
    return (
        token_logprobs(hidden, model.head_weight, SHAPE, labels, temperature, kept, Numerics.ALIGNED)[0]
        .detach()
        .numpy()
    )


async def test_the_logprob_of_every_kept_id_is_recorded_where_somebody_asks(reader):
    asked, *others = await answer(engine_of(reader), ask(kept_logprobs=True), *neighbours(6))
    plain = (await answer(engine_of(reader), ask()))[0]
    assert plain.kept.logprobs is None and all(columns.kept.logprobs is None for columns in others)
    assert asked.ids.tolist() == plain.ids.tolist()
    for token, id in enumerate(asked.ids.tolist()):
        row = asked.kept.slice(token, token + 1)
        assert np.exp(row.logprobs.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)
        assert row.logprobs[row.ids == id] == asked.logprobs[token], "to the bit"


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="one prefill"),
        pytest.param({"prefill_chunk_tokens": 7}, id="chunked prefill"),
        pytest.param({"prefix_cache": False}, id="no prefix cache"),
        pytest.param({"block_tokens": 3, "cache_tokens": 768}, id="odd blocks"),
    ],
)
@pytest.mark.parametrize("count", [0, 15], ids=["alone", "among 15"])
async def test_aligned_logprobs_equal_the_trainers_bit_for_bit(reader, settings, count):
    request = ask()
    columns, *_ = await answer(engine_of(reader, **settings), request, *neighbours(count))
    assert columns.logprobs.tobytes() == trainer_logprobs(request, columns).tobytes()
    alone = (await answer(engine_of(reader), request))[0]
    assert columns == alone


async def test_a_prefix_hit_changes_no_bit(reader):
    engine = engine_of(reader)
    await engine.update(0)
    first, second = await engine.generate(ask()), await engine.generate(ask())
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert first.columns == second.columns
    await engine.close()


async def test_tokens_depend_on_no_neighbour_in_fast_numerics(reader):
    alone = (await answer(engine_of(reader, numerics=Numerics.FAST), ask()))[0]
    among = (await answer(engine_of(reader, numerics=Numerics.FAST), *neighbours(15), ask()))[-1]
    assert alone.ids.tolist() == among.ids.tolist()
    assert alone.logprobs == pytest.approx(among.logprobs, abs=1e-5)


async def test_who_is_put_back_loses_no_token_and_no_bit(reader):
    requests = [ask(f"p{i}", 60, 40) for i in range(4)]
    roomy = await answer(engine_of(reader), *requests)
    tight = engine_of(reader, cache_tokens=CONTEXT, prefix_cache=False)
    assert await answer(tight, *requests) == roomy
    assert (await tight.status()).metrics["preemptions"] > 0


async def test_every_request_of_a_batch_has_its_own_temperature(reader):
    cold, hot = await answer(
        engine_of(reader), ask("x", temperature=0.01, top_p=1.0), ask("x", temperature=50.0, top_p=1.0)
    )
    assert cold.logprobs.max() > -0.5
    # near-uniform: every token is close to log(1/260)
    assert hot.logprobs == pytest.approx(np.full(12, -np.log(VOCAB)), abs=0.7)
    assert (cold.temperatures[0], hot.temperatures[0]) == (np.float32(0.01), np.float32(50.0))


async def test_padded_rows_of_the_vocabulary_are_never_sampled(reader):
    (columns,) = await answer(engine_of(reader), ask(max_tokens=200, temperature=100.0, top_p=1.0))
    assert columns.ids.max() < VOCAB


async def test_a_token_is_drawn_by_the_number_of_its_run_episode_turn_and_position():
    flat = {n: RawTensor("float32", raw.shape, raw.bits * 0) for n, raw in weight_set(0).tensors.items()}
    request = ask(max_tokens=20, temperature=1.0, top_p=1.0)
    (columns,) = await answer(engine_of(published(WeightSet(0, flat))), request)
    numbers = uniforms(np.full(20, stream_of(request.key), np.uint64), np.arange(20))
    assert columns.ids.tolist() == (numbers * VOCAB).astype(int).tolist()  # every token is equally likely


async def test_a_version_change_in_the_middle_shows_per_token_and_keeps_what_was_sampled(reader):
    engine = engine_of(reader)
    await engine.update(0)
    task = asyncio.create_task(engine.generate(ask(max_tokens=100)))
    while (await engine.status()).metrics["tokens_sampled"] < 5:  # noqa: ASYNC110 the port has no event for a token
        await asyncio.sleep(0)
    await engine.update(1)
    columns = (await task).columns
    await engine.close()
    num_old = int((columns.versions == 0).sum())
    assert columns.versions.tolist() == [0] * num_old + [1] * (100 - num_old)
    assert 5 <= num_old < 100
    (old,) = await answer(engine_of(reader), ask(max_tokens=100))
    assert columns.ids[:num_old].tolist() == old.ids[:num_old].tolist()
    assert columns.ids[num_old:].tolist() != old.ids[num_old:].tolist()


async def test_the_fingerprint_is_of_what_the_model_holds(reader):
    engine = engine_of(reader)
    status = await engine.update(1)
    assert status.fingerprint == reader.manifest(1).fingerprint
    await engine.close()


async def test_bfloat16_weights_load_bit_for_bit():
    reader = published(weight_set(0, dtype="bfloat16"))
    engine = engine_of(reader, dtype=torch.bfloat16, numerics=Numerics.FAST)
    assert (await engine.update(0)).fingerprint == reader.manifest(0).fingerprint
    assert len((await engine.generate(ask())).columns) == 12
    await engine.close()


async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay():
    narrow = LlamaConfig(**{**{name: getattr(SHAPE, name) for name in SHAPE.__slots__}, "intermediate_size": 40})
    reader = published(weight_set(0), weight_set(1, narrow))
    engine = engine_of(reader)
    held = await engine.update(0)
    with pytest.raises(EngineError, match="version 1 does not fit"):
        await engine.update(1)
    status = await engine.status()
    assert (status.policy_version, status.fingerprint) == (0, held.fingerprint)
    assert len((await engine.generate(ask())).columns) == 12
    await engine.close()


async def test_a_step_that_breaks_fails_who_runs_and_refuses_who_comes(reader):
    engine = engine_of(reader)
    await engine.update(0)
    with torch.no_grad():
        engine._model.named_weights()["model.norm.weight"].fill_(torch.nan)
    replies = await asyncio.gather(*[engine.generate(ask(name)) for name in "abc"], return_exceptions=True)
    assert all(isinstance(reply, EngineError) and "FloatingPointError" in str(reply) for reply in replies)
    with pytest.raises(EngineError, match="logits are not finite"):
        await engine.generate(ask())
    with pytest.raises(EngineError, match="logits are not finite"):
        await engine.update(1)
    await engine.close()


async def test_nothing_is_computed_while_another_holds_the_lease(reader):
    lease = asyncio.Lock()
    engine = engine_of(reader, lease=lease)
    await engine.update(0)
    async with lease:
        waiting, aborted = (asyncio.create_task(engine.generate(ask(name))) for name in ("w", "x"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        assert (await engine.status()).metrics["steps"] == 0
        await engine.abort(("x",))
        assert (await aborted).finish_reason is FinishReason.ABORT
    assert len((await waiting).columns) == 12
    await engine.close()


async def test_the_metrics_add_up(reader):
    engine = engine_of(reader)
    await engine.update(0)
    for _ in range(2):
        await asyncio.gather(*[engine.generate(ask(name, 40, 10)) for name in "abcd"])
    metrics = (await engine.status()).metrics
    await engine.close()
    assert (metrics["tokens_sampled"], metrics["prompt_tokens"]) == (80, 320)
    assert metrics["prefix_hit_tokens"] == 4 * 32
    assert metrics["tokens_computed"] == 320 - 128 + 80 - 8  # the last sampled token of a turn is not computed
    assert metrics["batch_size_mean"] == 80 / metrics["steps"]


def test_the_vocabulary_must_have_its_bytes(reader):
    with pytest.raises(ValueError, match="260 tokens, got bytes for 3"):
        TorchEngine(Llama(SHAPE), reader, token_bytes=[b"a"] * 3, config=EmbeddedConfig(), lease=asyncio.Lock())
