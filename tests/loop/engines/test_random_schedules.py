"""Random schedules of the step scheduler: no block leaks, none is shared by chance, every sequence ends."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everlong.engines.torch_engine.blocks import BlockPool
from everlong.engines.torch_engine.scheduler import Scheduler

BLOCK_TOKENS, CONTEXT = 2, 12


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
        self.pool = BlockPool(num_blocks, BLOCK_TOKENS)
        self.scheduler = Scheduler(
            self.pool,
            max_running=max_running,
            chunk_tokens=chunk_tokens,
            prefix_cache=prefix_cache,
            policy_version=1,
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
            assert {self.content[block][1] for block in used} == {frozenset({self.version})}, (
                "one version computed the prompt"
            )

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
