"""The step scheduler as a state machine: no block leaks, no block is shared by chance, every sequence ends."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everlong.engines.torch_engine.blocks import BlockPool
from everlong.engines.torch_engine.scheduler import Scheduler, Work

BLOCK_TOKENS, CONTEXT = 2, 12


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


class SchedulerMachine(RuleBasedStateMachine):
    """Random arrivals, steps, aborts and updates on a pool that is always too small."""

    @initialize(
        extra_blocks=st.integers(0, 6),
        max_running=st.integers(1, 5),
        chunk_tokens=st.integers(1, 9),
        prefix_cache=st.booleans(),
    )
    def start(self, extra_blocks, max_running, chunk_tokens, prefix_cache):
        num_blocks = CONTEXT // BLOCK_TOKENS + extra_blocks
        self.pool, self.scheduler = scheduler_of(
            num_blocks, max_running=max_running, chunk_tokens=chunk_tokens, prefix_cache=prefix_cache
        )
        self.version, self.limits, self.ended = 1, {}, Counter()
        self.content, self.history = {}, {}
        """What each block really holds: (ids from the root to its last token, versions that computed it); and who said what."""

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=CONTEXT - 1), answer=st.integers(1, CONTEXT))
    def add(self, prompt, answer):
        sequence = self.scheduler.add(list(prompt))
        self.limits[sequence] = min(CONTEXT, len(prompt) + answer)
        self.history[sequence] = list(prompt)

    @rule(token=st.integers(0, 1))
    def step(self, token):
        works = self.scheduler.plan()
        assert bool(works) == bool(self.limits), "whoever has sequences computes something"
        assert len({work.sequence for work in works}) == len(works)
        for work in works:
            self.check_prefix(work)
        sampling = [work.sequence for work in works if work.samples]
        self.scheduler.advance(works)
        for sequence in sampling:
            sequence.ids.append(token)
            self.history[sequence].append(token)
            if len(sequence.ids) == self.limits[sequence]:
                self.end(sequence)

    def check_prefix(self, work):
        """Every block before the work holds this sequence's own tokens; then the work fills its slots."""
        sequence = work.sequence
        assert len(sequence.blocks) == self.pool.blocks_for(len(sequence.ids))
        for position in range(work.start):
            ids, _ = self.content[sequence.blocks[position // BLOCK_TOKENS]]
            assert ids[: position + 1] == sequence.ids[: len(ids)][: position + 1]
        for position in range(work.start, work.start + work.count):
            block = sequence.blocks[position // BLOCK_TOKENS]
            assert self.pool._users[block] == 1, "nobody writes into a block that another reads"
            versions = self.content[block][1] if position % BLOCK_TOKENS else frozenset()
            self.content[block] = (sequence.ids[: position + 1], versions | {self.version})
        if sequence.num_sampled == 0:
            used = sequence.blocks[: self.pool.blocks_for(work.start + work.count)]
            assert {self.content[block][1] for block in used} == {frozenset({self.version})}, "one version computed the prompt"

    def end(self, sequence):
        self.scheduler.remove(sequence)
        del self.limits[sequence]
        self.ended[sequence.number] += 1

    @precondition(lambda self: self.limits)
    @rule(data=st.data())
    def abort(self, data):
        self.end(data.draw(st.sampled_from(sorted(self.limits, key=lambda sequence: sequence.number))))

    @rule(version=st.integers(1, 3))
    def update(self, version):
        self.version = version
        self.scheduler.change_version(self.version)

    @invariant()
    def every_block_is_accounted_for(self):
        users = Counter(block for sequence in self.scheduler.running for block in sequence.blocks)
        assert {block: n for block, n in enumerate(self.pool._users) if n} == dict(users)
        assert self.pool.num_available == self.pool.num_blocks - len(users)
        assert not any(sequence.blocks for sequence in self.scheduler.waiting)

    @invariant()
    def tokens_are_never_lost(self):
        assert all(sequence.ids == self.history[sequence] for sequence in self.limits)
        assert {*self.scheduler.running, *self.scheduler.waiting} == set(self.limits)

    @invariant()
    def who_runs_is_older_than_who_waits(self):
        numbers = [sequence.number for sequence in [*self.scheduler.running, *self.scheduler.waiting]]
        assert numbers == sorted(numbers)

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for _ in range(3000):
            if not self.limits:
                break
            self.step(1)
        assert not self.limits, "every sequence ends"
        assert set(self.ended.values()) <= {1}
        assert self.pool.num_available == self.pool.num_blocks


SchedulerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestRandomSchedules = SchedulerMachine.TestCase
