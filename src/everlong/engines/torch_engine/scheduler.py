"""Which tokens the next step computes: a state machine without clock and without torch, driven by the engine.

Invariants: running sequences are older than waiting ones; a running sequence owns the blocks of all its tokens; the
oldest always gets on, because whoever lacks a block puts back the newest. So every sequence ends.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from everlong.engines.torch_engine.blocks import BlockPool, Key


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and sampled tokens of one request, and how much of it is in the cache."""

    number: int
    """Grows with arrival."""
    ids: list[int]
    """The last one is not computed yet, except within a step."""
    num_prompt: int
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    link: int | None = None
    """Prefix up to the last indexed block; None when its blocks must not be indexed."""
    num_indexed: int = 0
    num_cached: int | None = None
    """Prompt tokens found in the prefix cache when it first ran."""

    @property
    def num_pending(self) -> int:
        return len(self.ids) - self.num_computed

    @property
    def num_sampled(self) -> int:
        return len(self.ids) - self.num_prompt


@dataclass(frozen=True, slots=True)
class Work:
    """Compute `count` tokens of a sequence from position `start`."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """The last known token is among them, so a next one can be sampled."""
        return self.start + self.count == len(self.sequence.ids)


class Scheduler:
    def __init__(
        self, pool: BlockPool, *, max_running: int, chunk_tokens: int, prefix_cache: bool, policy_version: int
    ) -> None:
        self._pool, self._max_running, self._chunk_tokens = pool, max_running, chunk_tokens
        self._prefix_cache, self._version = prefix_cache, policy_version
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._arrivals = 0
        self.num_preemptions = 0

    def add(self, prompt_ids: list[int]) -> Sequence:
        """The caller sees to it that prompt and answer together fit into the pool."""
        self._arrivals += 1
        sequence = Sequence(self._arrivals, prompt_ids, len(prompt_ids))
        self.waiting.append(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """The sequence ended, or was aborted. Only between `advance` and the next `plan`."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._pool.release(sequence.blocks)
            sequence.blocks = []
        else:
            self.waiting.remove(sequence)

    def change_version(self, policy_version: int) -> None:
        """From here on other weights compute.

        A sequence that has sampled goes on with its old keys and values, and is not indexed any further. One that has not
        starts anew, so a turn sampled under one version was computed under it from its first token on.
        """
        self._version = policy_version
        for sequence in list(self.running):
            if sequence.num_sampled:
                sequence.link = None
            else:
                self._put_back(sequence)
                sequence.num_cached = None

    def plan(self) -> list[Work]:
        """The next step: a token of every sequence that decodes, then prompt tokens, oldest first, within the chunk."""
        preemptions = self.num_preemptions
        decoding = [sequence for sequence in self.running if sequence.num_pending == 1]
        works = [Work(sequence, sequence.num_computed, 1) for sequence in decoding if self._grow(sequence)]
        budget = self._chunk_tokens
        for sequence in self.running:
            if sequence.num_pending > 1 and budget:
                works.append(self._chunk(sequence, budget))
                budget -= works[-1].count
        while budget and self.waiting and preemptions == self.num_preemptions and self._admit(self.waiting[0]):
            works.append(self._chunk(self.running[-1], budget))
            budget -= works[-1].count
        assert works or not (self.running or self.waiting), "sequences wait and nothing can run"
        return works

    def advance(self, works: list[Work]) -> None:
        """The step was computed: its keys and values are in the cache, full blocks can be found."""
        for work in works:
            sequence = work.sequence
            sequence.num_computed = work.start + work.count
            full = sequence.num_computed // self._pool.block_tokens
            while sequence.link is not None and sequence.num_indexed < full:
                number = sequence.num_indexed
                sequence.link = self._pool.index(sequence.link, sequence.ids, number, sequence.blocks[number])
                sequence.num_indexed += 1

    def _chunk(self, sequence: Sequence, budget: int) -> Work:
        return Work(sequence, sequence.num_computed, min(sequence.num_pending, budget))

    def _grow(self, sequence: Sequence) -> bool:
        """Take the block that the next token needs; False where the sequence itself had to be put back."""
        if not sequence.blocks:
            return False  # put back for an older one a moment ago
        missing = self._pool.blocks_for(len(sequence.ids)) - len(sequence.blocks)
        while missing > self._pool.num_available:
            newest = self.running[-1]
            self.num_preemptions += 1
            self._put_back(newest)
            if newest is sequence:
                return False
        sequence.blocks += self._pool.take(missing)
        return True

    def _put_back(self, sequence: Sequence) -> None:
        """Its tokens stay; keys and values are computed again, or found again, when its turn comes."""
        self.running.remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed, sequence.num_indexed, sequence.link = [], 0, 0, None
        insort(self.waiting, sequence, key=lambda waiting: waiting.number)

    def _admit(self, sequence: Sequence) -> bool:
        """Take blocks for all its tokens, leaving one for each that runs already, so that it is not put back at once.

        Not while a running sequence computes the block that this one needs next: a group's prompt is computed once.
        """
        if len(self.running) >= self._max_running:
            return False
        blocks, link = [], None
        if self._prefix_cache:
            # the last token is always computed, since it gives the logits
            findable = (len(sequence.ids) - 1) // self._pool.block_tokens
            blocks, link = self._pool.find(self._pool.root(self._version), sequence.ids, findable)
            if len(blocks) < findable and self._under_way(self._pool.key(link, sequence.ids, len(blocks))):
                self._pool.release(blocks)
                return False
        missing = self._pool.blocks_for(len(sequence.ids)) - len(blocks)
        if missing + len(self.running) > self._pool.num_available:
            self._pool.release(blocks)
            return False
        sequence.blocks, sequence.link, sequence.num_indexed = blocks + self._pool.take(missing), link, len(blocks)
        sequence.num_computed = len(blocks) * self._pool.block_tokens
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
        self.running.append(self.waiting.pop(0))
        return True

    def _under_way(self, key: Key) -> bool:
        """A running sequence will have this block computed, and findable, in a later step."""
        size = self._pool.block_tokens
        return any(
            key == self._pool.key(sequence.link, sequence.ids, sequence.num_indexed)
            for sequence in self.running
            if sequence.link is not None and (sequence.num_indexed + 1) * size <= len(sequence.ids)
        )
