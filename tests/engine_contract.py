"""What every engine promises. A test module of each engine imports everything here and gives two fixtures: `engine`, which
has the store of `published`, and `cache_unit`, the tokens that its prefix cache keeps together.
"""

import asyncio

import numpy as np
import pytest

from everlong.contracts.errors import EngineError, StaleWeights
from everlong.contracts.records import FinishReason, GenerateRequest, SamplingKey, SamplingParams
from everlong.engines.pool.pool import EnginePool
from everlong.engines.scripted import Fault, ScriptedEngine
from everlong.models.llama.config import LlamaConfig
from everlong.models.llama.model import Llama
from everlong.storage import open_store
from everlong.weights import RawTensor, WeightPublisher, WeightSet

VOCAB, CONTEXT = 20, 1024
HELD_TOKENS = 400
"""Of a request that is to be still running when it is met with something."""
TOKEN_BYTES = [chr(ord("a") + i).encode() for i in range(VOCAB)]
SHAPE = LlamaConfig(
    vocab_size=VOCAB,
    padded_vocab_size=24,
    hidden_size=64,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    max_positions=CONTEXT,
)


def weight_set(version):
    random = np.random.default_rng(version)
    shapes = {name: tuple(weight.shape) for name, weight in Llama(SHAPE).named_weights().items()}
    values = {name: (random.standard_normal(shape) * 0.5).astype(np.float32) for name, shape in shapes.items()}
    return WeightSet(version, {n: RawTensor("float32", v.shape, v.view(np.uint32)) for n, v in values.items()})


def published(url):
    """A store with the versions 3, an anchor, and 4, a delta."""
    store = open_store(url)
    publisher = WeightPublisher(store, anchor_every=4)
    versions = [weight_set(version) for version in (3, 4)]
    publisher.publish(versions[0], None)
    publisher.publish(versions[1], versions[0])
    return store


def ask(prompt=(1, 2, 3), request_id="r", turn=0, min_policy_version=0, **params):
    return GenerateRequest(
        request_id=request_id,
        key=SamplingKey(run_seed=1, episode="train-000000-000", turn=turn),
        prompt_ids=np.array(prompt, np.int32),
        params=SamplingParams(**{"max_tokens": 6, **params}),
        min_policy_version=min_policy_version,
    )


async def test_every_stream_has_the_length_of_the_ids(engine):
    await engine.update(3)
    reply = await engine.generate(ask(max_tokens=6, temperature=0.5))
    columns = reply.columns
    assert (len(columns), columns.num_sampled, len(columns.kept)) == (6, 6, 6)
    assert reply.num_reported == 6
    assert reply.finish_reason is FinishReason.LENGTH
    assert columns.versions.tolist() == [3] * 6
    assert columns.temperatures.tolist() == [0.5] * 6
    assert np.all(columns.logprobs <= 0)


async def test_a_retry_gives_the_same_tokens_and_another_turn_gives_others(engine):
    await engine.update(3)
    first, again = await engine.generate(ask(turn=1)), await engine.generate(ask(turn=1, request_id="retry"))
    other = await engine.generate(ask(turn=2))
    assert first.columns == again.columns
    assert first.columns.ids.tolist() != other.columns.ids.tolist()


async def test_truncated_sampling_records_a_kept_set_for_every_token(engine):
    await engine.update(3)
    columns = (await engine.generate(ask(top_k=1))).columns
    assert np.diff(columns.kept.offsets).tolist() == [1] * 6
    assert columns.kept.ids.tolist() == columns.ids.tolist()
    assert columns.logprobs.tolist() == [0.0] * 6


async def test_a_stop_id_ends_the_turn_and_stays_in_it(engine):
    await engine.update(3)
    ids = (await engine.generate(ask(max_tokens=12))).columns.ids.tolist()
    stop = ids[4]
    reply = await engine.generate(ask(max_tokens=12, stop_ids=(stop,)))
    assert reply.columns.ids.tolist() == ids[: ids.index(stop) + 1]
    assert (reply.finish_reason, reply.stop_match) == (FinishReason.STOP, stop)


async def test_a_stop_string_over_two_tokens_ends_the_turn_and_nothing_is_cut(engine):
    await engine.update(3)
    ids = (await engine.generate(ask(max_tokens=12))).columns.ids.tolist()
    text = "".join(chr(ord("a") + i) for i in ids)
    stop = text[3:5]
    reply = await engine.generate(ask(max_tokens=12, stop_strings=(stop,)))
    assert reply.columns.ids.tolist() == ids[: text.index(stop) + 2]
    assert (reply.finish_reason, reply.stop_match) == (FinishReason.STOP, stop)


async def test_an_update_is_idempotent_and_changes_the_fingerprint_of_what_samples(engine):
    first = await engine.update(3)
    assert (await engine.update(3)).fingerprint == first.fingerprint
    second = await engine.update(4)
    assert (first.policy_version, second.policy_version) == (3, 4)
    assert first.fingerprint != second.fingerprint
    assert (await engine.generate(ask())).columns.versions.tolist() == [4] * 6


async def test_an_unknown_version_is_refused_and_the_old_weights_stay(engine):
    held = await engine.update(3)
    before = await engine.generate(ask())
    with pytest.raises(StaleWeights, match="9"):
        await engine.update(9)
    status = await engine.status()
    assert (status.policy_version, status.fingerprint) == (3, held.fingerprint)
    assert (await engine.generate(ask())).columns == before.columns


async def test_nothing_is_sampled_before_the_first_version(engine):
    with pytest.raises(StaleWeights, match="no published version"):
        await engine.generate(ask())


async def test_a_request_that_needs_a_newer_version_is_refused_until_the_update(engine):
    await engine.update(3)
    with pytest.raises(StaleWeights, match="needs policy version 4, the engine is at 3"):
        await engine.generate(ask(min_policy_version=4))
    await engine.update(4)
    assert len((await engine.generate(ask(min_policy_version=4))).columns) == 6


async def test_the_prefix_cache_does_not_survive_an_update(engine, cache_unit):
    prompt = [i % VOCAB for i in range(2 * cache_unit + 1)]
    cached = []
    for version in (3, 4):
        await engine.update(version)
        cached += [(await engine.generate(ask(prompt))).num_cached_tokens for _ in range(2)]
    assert cached == [0, 2 * cache_unit] * 2


async def test_the_next_turn_finds_the_whole_last_turn_in_the_cache(engine, cache_unit):
    await engine.update(3)
    prompt = [(7 + 3 * i) % VOCAB for i in range(2 * cache_unit + 1)]
    first = await engine.generate(ask(prompt, max_tokens=2 * cache_unit))
    history = [*prompt, *first.columns.ids.tolist()]  # a token more than whole units, and the last is not computed
    second = await engine.generate(ask([*history, 5, 6], turn=1))
    assert second.num_cached_tokens == 4 * cache_unit


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        pytest.param([], {}, "empty prompt", id="empty prompt"),
        pytest.param([1, VOCAB], {}, "id 20, the vocabulary is 0 to 19", id="id beyond the vocabulary"),
        pytest.param([-1, 1], {}, "id -1", id="negative id"),
        pytest.param([1] * CONTEXT, {}, f"prompt of {CONTEXT} tokens.*context of {CONTEXT}", id="no room to sample"),
        pytest.param([1], {"temperature": 0.0}, "top_k=1", id="temperature 0"),
        pytest.param([1], {"temperature": float("nan")}, "temperature must be finite", id="temperature NaN"),
        pytest.param([1], {"temperature": float("inf")}, "temperature must be finite", id="temperature infinite"),
        pytest.param([1], {"top_p": 0.0}, "top_p", id="top_p 0"),
        pytest.param([1], {"top_k": -1}, "top_k", id="negative top_k"),
        pytest.param([1], {"max_tokens": 0}, "max_tokens", id="no tokens wanted"),
        pytest.param([1], {"stop_ids": (VOCAB,)}, "stop_ids", id="stop id that cannot come"),
        pytest.param([1], {"stop_strings": ("",)}, "empty string", id="empty stop string"),
    ],
)
async def test_a_request_that_can_never_run_is_refused(engine, prompt, params, message):
    await engine.update(3)
    with pytest.raises(ValueError, match=message):
        await engine.generate(ask(prompt, **params))


async def test_max_tokens_shrinks_to_what_the_context_leaves(engine):
    await engine.update(3)
    reply = await engine.generate(ask([1] * (CONTEXT - 1), max_tokens=100))
    assert (len(reply.columns), reply.finish_reason) == (1, FinishReason.LENGTH)


def scripted_in(engine):
    """The scripted engines that answer for it."""
    members = engine.members if isinstance(engine, EnginePool) else [engine]
    return [member for member in members if isinstance(member, ScriptedEngine)]


async def hold(engine):
    """A request that is certainly still running, as a task."""
    for scripted in scripted_in(engine):
        scripted.inject(Fault.STALL)
    task = asyncio.create_task(engine.generate(ask(max_tokens=HELD_TOKENS, request_id="held")))
    for _ in range(10_000):
        await asyncio.sleep(0)
        if (await engine.status()).num_running:
            return task
    raise AssertionError("the request never ran")


async def test_an_update_in_the_middle_of_a_request_shows_in_the_versions_of_its_tokens(engine):
    await engine.update(3)
    task = await hold(engine)
    await engine.update(4)
    for scripted in scripted_in(engine):
        scripted.resume()
    versions = (await task).columns.versions.tolist()
    assert len(versions) == HELD_TOKENS
    assert versions == sorted(versions) and set(versions) <= {3, 4} and versions[-1] == 4


async def test_more_requests_than_run_together_are_all_answered(engine):
    await engine.update(3)
    requests = [ask(request_id=f"r{number}", turn=number, max_tokens=3) for number in range(70)]
    replies = await asyncio.gather(*(engine.generate(request) for request in requests))
    assert [reply.request_id for reply in replies] == [request.request_id for request in requests]
    assert {len(reply.columns) for reply in replies} == {3}
    assert (await engine.status()).num_running == 0


async def test_an_aborted_request_answers_with_what_it_sampled(engine):
    await engine.update(3)
    task = await hold(engine)
    await engine.abort(("held", "unknown"))
    reply = await task
    assert reply.finish_reason is FinishReason.ABORT
    assert len(reply.columns) < HELD_TOKENS
    assert (await engine.status()).num_running == 0
    whole = await engine.generate(ask(max_tokens=HELD_TOKENS))
    assert reply.columns.ids.tolist() == whole.columns.ids.tolist()[: len(reply.columns)]


async def test_a_cancelled_caller_leaves_nothing_running(engine):
    await engine.update(3)
    task = await hold(engine)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len((await engine.generate(ask())).columns) == 6
    assert (await engine.status()).num_running == 0


async def test_closing_answers_who_waits_and_refuses_who_comes(engine):
    await engine.update(3)
    task = await hold(engine)
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await task
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(ask())
    with pytest.raises(EngineError, match="closed"):
        await engine.update(4)
