"""What a step computes: chunks beside decoding, who is put back, what an update changes."""

from everlong.engines.torch_engine.blocks import BlockPool
from everlong.engines.torch_engine.scheduler import Scheduler, Work

BLOCK_TOKENS = 2


def scheduler_of(num_blocks, *, max_running=4, chunk_tokens=4, prefix_cache=True):
    pool = BlockPool(num_blocks, BLOCK_TOKENS)
    return pool, Scheduler(
        pool, max_running=max_running, chunk_tokens=chunk_tokens, prefix_cache=prefix_cache, policy_version=1
    )


def step(scheduler, token=7):
    """Compute a step and sample `token` wherever one can be sampled; the works."""
    works = scheduler.plan()
    sampling = [work.sequence for work in works if work.samples]
    scheduler.advance(works)
    for sequence in sampling:
        sequence.ids.append(token)
    return works


def shape(works):
    return [(work.sequence.number, work.start, work.count) for work in works]


def test_a_long_prompt_is_cut_into_chunks_while_others_decode():
    _, scheduler = scheduler_of(20)
    scheduler.add([1, 2, 3])
    assert shape(step(scheduler)) == [(1, 0, 3)]
    scheduler.add([4] * 9)
    assert shape(step(scheduler)) == [(1, 3, 1), (2, 0, 4)]
    assert shape(step(scheduler)) == [(1, 4, 1), (2, 4, 4)]
    assert shape(step(scheduler)) == [(1, 5, 1), (2, 8, 1)]


def test_one_chunk_serves_several_prompts_in_order_of_arrival():
    _, scheduler = scheduler_of(20)
    for prompt in ([1, 2], [3, 4, 5], [6]):
        scheduler.add(prompt)
    assert shape(step(scheduler)) == [(1, 0, 2), (2, 0, 2)]
    assert shape(step(scheduler)) == [(1, 2, 1), (2, 2, 1), (3, 0, 1)]


def test_no_more_than_max_running_run():
    _, scheduler = scheduler_of(20, max_running=2)
    for _ in range(3):
        scheduler.add([1])
    step(scheduler)
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 1)


def test_when_blocks_run_out_the_newest_is_put_back_with_its_tokens_and_computed_again():
    _, scheduler = scheduler_of(5, chunk_tokens=8, prefix_cache=False)
    old, new = scheduler.add([1, 2, 3]), scheduler.add([4, 5, 6])  # two blocks each; the fifth is soon gone
    step(scheduler)
    step(scheduler)
    assert shape(step(scheduler)) == [(1, 4, 1)]  # both need a third block: the older one gets it
    assert scheduler.num_preemptions == 1
    assert (new.ids, new.num_computed, new.blocks) == ([4, 5, 6, 7, 7], 0, [])
    scheduler.remove(old)
    (work,) = step(scheduler)
    assert (work.sequence, work.start, work.count) == (new, 0, 5)


def test_a_full_prefix_hit_still_computes_the_last_prompt_token():
    _, scheduler = scheduler_of(20)
    first = scheduler.add([1, 2, 3, 4])
    step(scheduler)
    scheduler.remove(first)
    second = scheduler.add([1, 2, 3, 4])
    assert shape(step(scheduler)) == [(2, 2, 2)]
    assert second.num_cached == 2


def test_an_update_restarts_who_has_not_sampled_and_keeps_who_has():
    _, scheduler = scheduler_of(20)
    sampling, starting = scheduler.add([1, 2]), scheduler.add([3] * 6)
    step(scheduler)
    assert (sampling.num_sampled, starting.num_computed) == (1, 2)
    scheduler.change_version(2)
    assert (sampling.num_computed, starting.num_computed, starting.blocks) == (2, 0, [])
    assert shape(step(scheduler)) == [(1, 2, 1), (2, 0, 4)]


def test_only_what_one_version_computed_is_found():
    _, scheduler = scheduler_of(20)
    mixed = scheduler.add([1, 2])
    step(scheduler)
    scheduler.change_version(2)
    for _ in range(4):
        step(scheduler)
    history = list(mixed.ids)
    scheduler.remove(mixed)
    for version, num_cached in ((2, 0), (1, 2)):
        scheduler.change_version(version)
        again = scheduler.add(list(history))
        step(scheduler)
        assert again.num_cached == num_cached
        scheduler.remove(again)


def test_work_samples_exactly_when_it_reaches_the_last_known_token():
    _, scheduler = scheduler_of(20)
    sequence = scheduler.add([1, 2, 3])
    assert [Work(sequence, 0, count).samples for count in (2, 3)] == [False, True]


def test_a_prompt_that_several_requests_share_is_computed_once():
    _, scheduler = scheduler_of(20, chunk_tokens=16)
    for _ in range(3):
        scheduler.add([1, 2, 3, 4, 5])
    assert shape(step(scheduler)) == [(1, 0, 5)]
    assert shape(step(scheduler)) == [(1, 5, 1), (2, 4, 1), (3, 4, 1)]


def test_who_waits_for_a_shared_beginning_goes_on_where_it_ends():
    """The first is computed in two chunks; the second needs one block of the second chunk and then its own tokens."""
    _, scheduler = scheduler_of(20, chunk_tokens=4)
    scheduler.add([1, 2, 3, 4, 5, 6, 7])
    scheduler.add([1, 2, 3, 4, 5, 6, 9, 9])
    assert shape(step(scheduler)) == [(1, 0, 4)]
    assert shape(step(scheduler)) == [(1, 4, 3)]
    assert shape(step(scheduler)) == [(1, 7, 1), (2, 6, 2)]


def test_a_prompt_put_back_lets_the_one_that_waits_for_it_go_on():
    _, scheduler = scheduler_of(20, chunk_tokens=2)
    first = scheduler.add([1, 2, 3, 4, 5])
    scheduler.add([1, 2, 3, 4, 6])
    step(scheduler)
    scheduler.remove(first)
    assert shape(step(scheduler)) == [(2, 2, 2)]
