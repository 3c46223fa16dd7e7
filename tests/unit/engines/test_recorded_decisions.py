"""The embedded engine with experts: every token's routes are recorded, wherever they were computed, and to the bit."""

import asyncio

import numpy as np
import pytest
import torch

from everlong.contracts.decisions import Decisions
from everlong.contracts.records import FinishReason, GenerateRequest, SamplingKey, SamplingParams
from everlong.contracts.tokens import TokenColumns
from everlong.engines.config import EmbeddedConfig
from everlong.engines.scripted import ScriptedEngine
from everlong.engines.torch_engine.engine import TorchEngine
from everlong.models.attention import TreeAttention
from everlong.models.decisions import Recorder
from everlong.models.head import token_logprobs
from everlong.models.moe.config import EXPERT_WEIGHTS, EXPERTS, MoeConfig
from everlong.models.networks import empty_network
from everlong.models.numerics import Numerics
from everlong.models.toy import random_llama
from everlong.storage import open_store
from everlong.trajectories.tree import EpisodeTree
from everlong.weights import RawTensor, WeightPublisher, WeightReader, WeightSet

VOCAB, CONTEXT = 260, 256
SHAPES = {
    router: MoeConfig(
        vocab_size=VOCAB, padded_vocab_size=264, hidden_size=32, intermediate_size=24, num_layers=3, num_heads=4,
        num_kv_heads=2, head_dim=8, max_positions=CONTEXT, router=router,
    )
    for router in ("softmax", "sigmoid")
}  # fmt: skip
SHAPE = SHAPES["softmax"]
ALL = (EXPERTS, EXPERT_WEIGHTS)


def weight_set(version, shape=SHAPE):
    weights = random_llama(shape, version).named_weights()
    bits = {name: (weight.detach() * 15).view(torch.uint32).numpy() for name, weight in weights.items()}
    return WeightSet(version, {name: RawTensor("float32", raw.shape, raw) for name, raw in bits.items()})


def published(*sets):
    store = open_store("memory://")
    for weights in sets:
        WeightPublisher(store, anchor_every=1).publish(weights, None)
    return WeightReader(store)


@pytest.fixture(scope="module")
def reader():
    return published(weight_set(0), weight_set(1))


def engine_of(reader, *, shape=SHAPE, numerics=Numerics.ALIGNED, **settings):
    config = EmbeddedConfig(**{"block_tokens": 8, "cache_tokens": 4096, **settings})
    token_bytes = [bytes([i % 256]) for i in range(VOCAB)]
    model = empty_network(shape, numerics=numerics)
    return TorchEngine(model, reader, token_bytes=token_bytes, config=config, lease=asyncio.Lock())


def ask(name="a", num_prompt=40, max_tokens=12, *, num_known=0, prompt=None, **params):
    if prompt is None:
        prompt = np.random.default_rng([*name.encode()]).integers(0, VOCAB, num_prompt).astype(np.int32)
    return GenerateRequest(
        request_id=name,
        key=SamplingKey(run_seed=1, episode=name, turn=0),
        prompt_ids=prompt,
        params=SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.7, "top_p": 0.9, "record": ALL, **params}),
        num_known=num_known,
    )


async def answer(engine, *requests, version=0):
    await engine.update(version)
    replies = await asyncio.gather(*[engine.generate(request) for request in requests])
    await engine.close()
    return replies


def trainer_pass(request, reply, shape=SHAPE, version=0):
    """What a training forward over prompt and answer decides at each position, and the logprobs of the answer."""
    model = empty_network(shape, numerics=Numerics.ALIGNED)
    tensors = weight_set(version, shape).tensors
    model.load_weights({name: torch.from_numpy(raw.bits.copy()).view(torch.float32) for name, raw in tensors.items()})
    columns, num_prompt = reply.columns, len(request.prompt_ids)
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, columns.ids])).long()
    attend, recorder = TreeAttention([(-1, 0, len(ids))], shape.head_dim**-0.5, Numerics.ALIGNED), Recorder()
    with torch.no_grad():
        hidden = model(ids, torch.arange(len(ids)), attend, recorder)[num_prompt - 1 : -1]
        kept = torch.from_numpy(columns.kept.ids), torch.from_numpy(columns.kept.offsets)
        temperature, labels = torch.from_numpy(columns.temperatures), ids[num_prompt:]
        scored = token_logprobs(hidden, model.head_weight, shape, labels, temperature, kept, Numerics.ALIGNED)[0]
    return {name: rows.numpy() for name, rows in recorder.rows().items()}, scored.numpy()


def rows_of(reply):
    return Decisions.join([reply.context, reply.columns.decisions])


def assert_is_the_trainers(request, reply, shape=SHAPE):
    """A token's row is of the position before it; the last token went through no network, and the first has none before it."""
    expected, logprobs = trainer_pass(request, reply, shape)
    rows = rows_of(reply)
    assert rows.known(EXPERTS).tolist() == [False] + [True] * (len(rows) - 1)
    assert rows.rows[EXPERTS][1:].tolist() == expected[EXPERTS][:-1].tolist()
    assert rows.rows[EXPERT_WEIGHTS][1:].tobytes() == expected[EXPERT_WEIGHTS][:-1].tobytes(), "to the bit"
    assert reply.columns.logprobs.tobytes() == logprobs.tobytes(), "to the bit"


@pytest.mark.parametrize(("num_prompt", "max_tokens", "rows"), [(5, 3, 7), (5, 1, 5), (1, 1, 1), (1, 4, 4)])
async def test_as_many_rows_as_tokens_went_through_the_network(reader, num_prompt, max_tokens, rows):
    (reply,) = await answer(engine_of(reader), ask("b", num_prompt, max_tokens))
    assert (len(reply.context), len(reply.columns.decisions)) == (num_prompt, max_tokens)
    assert rows_of(reply).known(EXPERTS).sum() == rows_of(reply).known(EXPERT_WEIGHTS).sum() == rows


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="one prefill"),
        pytest.param({"prefill_chunk_tokens": 7}, id="chunked prefill"),
        pytest.param({"prefix_cache": False}, id="no prefix cache"),
        pytest.param({"block_tokens": 3, "cache_tokens": 768}, id="odd blocks"),
    ],
)
@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
async def test_routes_weights_and_logprobs_are_the_trainers_bit_for_bit(settings, router):
    shape = SHAPES[router]
    engine = engine_of(published(weight_set(0, shape)), shape=shape, **settings)
    requests = [ask(), *(ask(f"n{i}", 1 + 13 * i, 3 + 2 * i, temperature=0.4 + 0.2 * i) for i in range(6))]
    for request, reply in zip(requests, await answer(engine, *requests), strict=True):
        assert_is_the_trainers(request, reply, shape)


async def test_a_prefix_that_went_through_no_network_again_has_its_rows(reader):
    engine = engine_of(reader)
    await engine.update(0)
    first, second = await engine.generate(ask()), await engine.generate(ask())
    await engine.close()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 32)
    assert second.columns == first.columns
    assert all(
        np.array_equal(rows, rows_of(first).rows[name], equal_nan=True) for name, rows in rows_of(second).rows.items()
    )
    assert_is_the_trainers(ask(), second)


async def test_who_is_put_back_has_the_rows_of_its_tokens(reader):
    requests = [ask(f"p{i}", 60, 40) for i in range(4)]
    tight = engine_of(reader, cache_tokens=CONTEXT, prefix_cache=False)
    replies = await answer(tight, *requests)
    assert (await tight.status()).metrics["preemptions"] > 0
    for request, reply in zip(requests, replies, strict=True):
        assert_is_the_trainers(request, reply)


async def test_a_second_turn_brings_what_the_first_did_not(reader):
    """Together they have one row for every token but the first, that of the first turn's last token among them."""
    engine, tree = engine_of(reader), EpisodeTree()
    await engine.update(0)
    request = ask(num_prompt=20, max_tokens=6)
    reply = await engine.generate(request)
    tree.add(request.prompt_ids, reply.columns, FinishReason.STOP, decisions=reply.context)
    prompt = np.concatenate([request.prompt_ids, reply.columns.ids, np.int32([9, 8, 7])])
    assert tree.num_known(prompt) == 26
    second = ask("b", prompt=prompt, max_tokens=5, num_known=26)
    again = await engine.generate(second)
    await engine.close()
    assert (len(again.context), len(again.columns.decisions)) == (3, 5)
    turn = tree.add(prompt, again.columns, FinishReason.STOP, decisions=again.context)
    columns = tree.columns(turn)
    expected, _ = trainer_pass(second, again)
    assert columns.decisions.rows[EXPERTS][1:].tolist() == expected[EXPERTS][:-1].tolist()
    assert columns.decisions.rows[EXPERT_WEIGHTS][1:].tobytes() == expected[EXPERT_WEIGHTS][:-1].tobytes()


async def test_a_prompt_that_is_known_whole_brings_the_rows_of_its_answer(reader):
    request = ask(num_prompt=20, max_tokens=3)
    whole, known = await answer(engine_of(reader), request, ask("a", num_prompt=20, max_tokens=3, num_known=20))
    assert len(known.context) == 0 and known.columns == whole.columns


async def test_a_version_change_in_the_middle_shows_in_the_rows(reader):
    engine = engine_of(reader)
    await engine.update(0)
    task = asyncio.create_task(engine.generate(ask(max_tokens=100)))
    while (await engine.status()).metrics["tokens_sampled"] < 5:  # noqa: ASYNC110 the port has no event for a token
        await asyncio.sleep(0)
    await engine.update(1)
    reply = await task
    await engine.close()
    num_old = int((reply.columns.versions == 0).sum())
    (old,) = await answer(engine_of(reader), ask(max_tokens=100))
    ours, theirs = (r.columns.decisions.rows[EXPERTS] for r in (reply, old))
    assert ours[:num_old].tolist() == theirs[:num_old].tolist()
    assert ours[num_old:].tolist() != theirs[num_old:].tolist()
    assert rows_of(reply).known(EXPERTS).sum() == 139


async def test_an_aborted_answer_has_the_rows_of_what_it_sampled(reader):
    engine = engine_of(reader)
    await engine.update(0)
    task = asyncio.create_task(engine.generate(ask(max_tokens=100)))
    while (await engine.status()).metrics["tokens_sampled"] < 5:  # noqa: ASYNC110 the port has no event for a token
        await asyncio.sleep(0)
    await engine.abort(("a",))
    reply = await task
    await engine.close()
    assert reply.finish_reason is FinishReason.ABORT
    assert rows_of(reply).known(EXPERTS).sum() == 40 + len(reply.columns) - 1


async def test_nothing_is_recorded_where_nobody_asks_and_names_alone_that_are_asked_for(reader):
    plain, one = await answer(engine_of(reader), ask(record=()), ask(record=(EXPERTS,)))
    assert plain.context is None and plain.columns.decisions.rows == {}
    assert one.columns.decisions.rows.keys() == one.context.rows.keys() == {EXPERTS}
    assert one.columns.decisions.size_bytes == 12 * 3 * 2, "a byte for each choice"
    assert plain.columns.ids.tolist() == one.columns.ids.tolist()
    assert plain.columns.logprobs.tobytes() == one.columns.logprobs.tobytes()


@pytest.mark.parametrize("numerics", list(Numerics))
async def test_fast_numerics_record_what_they_chose_too(reader, numerics):
    (reply,) = await answer(engine_of(reader, numerics=numerics), ask())
    rows = rows_of(reply)
    assert rows.known(EXPERTS).sum() == 51 and rows.rows[EXPERTS][1:].max() < 8
    assert rows.rows[EXPERT_WEIGHTS][1:].sum(-1) == pytest.approx(1, abs=1e-5)


async def test_what_an_engine_cannot_record_is_refused_by_name(reader):
    engine = engine_of(reader)
    await engine.update(0)
    with pytest.raises(ValueError, match=r"wants blocks recorded, and this engine records experts, expert_weights"):
        await engine.generate(ask(record=("blocks",)))
    with pytest.raises(ValueError, match="41 of 40 tokens are known"):
        await engine.generate(ask(num_known=41))
    await engine.close()
    scripted = ScriptedEngine(lambda request: [5], token_bytes=[b"a"] * VOCAB, policy_version=0)
    with pytest.raises(ValueError, match="this engine records no decisions"):
        await scripted.generate(ask())


def test_a_tree_forks_with_the_rows_of_each_branch():
    """Two turns from one prompt: what each saw of the branching token is on its own first token."""

    def decided(value, count):
        return Decisions(num_tokens=count, rows={EXPERTS: np.full((count, 3, 2), value, np.uint8)})

    def sampled(ids, value):
        return TokenColumns.sampled_tokens(ids, [-1.0] * len(ids), version=0, decisions=decided(value, len(ids)))

    tree = EpisodeTree()
    tree.add([1, 2, 3], sampled([4, 5], 1), FinishReason.STOP, decisions=decided(0, 3))
    for value in (2, 3):
        prompt = [1, 2, 3, 4, 5, value]
        turn = tree.add(prompt, sampled([7], value), FinishReason.STOP, decisions=decided(value, 1))
        column = tree.columns(turn).decisions.rows[EXPERTS][:, 0, 0]
        assert column.tolist() == [0, 0, 0, 1, 1, value, value]
