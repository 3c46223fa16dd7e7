"""Who owns which block of the key-value cache, and which blocks can be found again by what they hold. No torch.

Invariants: a block is free, idle (indexed, nobody uses it) or used by as many sequences as its count says; only blocks
that were found by their content are used by more than one. Idle blocks are taken back least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

Key = tuple[int, bytes]
"""The link of the block before, and the ids the block holds: equal keys are equal prefixes, since dicts compare them."""


class BlockPool:
    """Links are numbers that name a prefix: a version's empty one, or all ids up to the end of an indexed block."""

    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.num_blocks, self.block_tokens = num_blocks, block_tokens
        self._free = list(range(num_blocks))[::-1]
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._users = [0] * num_blocks
        self._index: dict[Key, tuple[int, int]] = {}
        """Key -> block, and the link of the prefix that ends with it."""
        self._keys: dict[int, Key] = {}
        self._roots: dict[int, int] = {}
        self._last_link = 0

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    def root(self, policy_version: int) -> int:
        """Link of the empty prefix: another one for every version, so no version finds another's keys and values."""
        if policy_version not in self._roots:
            self._roots[policy_version] = self._next_link()
        return self._roots[policy_version]

    def find(self, link: int, ids: Sequence[int], max_blocks: int) -> tuple[list[int], int]:
        """Take the indexed blocks that hold a prefix of `ids`, and the link behind them."""
        blocks: list[int] = []
        while len(blocks) < max_blocks:
            found = self._index.get(self.key(link, ids, len(blocks)))
            if found is None:
                break
            block, link = found
            self._idle.pop(block, None)
            self._users[block] += 1
            blocks.append(block)
        return blocks, link

    def take(self, count: int) -> list[int]:
        """`count` blocks whose content is lost; at most `num_available`."""
        assert count <= self.num_available, f"{count} blocks wanted, {self.num_available} are to be had"
        blocks = []
        for _ in range(count):
            if not self._free:
                oldest, _ = self._idle.popitem(last=False)
                del self._index[self._keys.pop(oldest)]
                self._free.append(oldest)
            block = self._free.pop()
            self._users[block] = 1
            blocks.append(block)
        return blocks

    def index(self, link: int, ids: Sequence[int], number: int, block: int) -> int:
        """Make the sequence's full block `number`, which stands behind `link`, findable; the link that ends with it.

        Where another block holds the same already, that one stays the findable one.
        """
        key = self.key(link, ids, number)
        found = self._index.get(key)
        if found is not None:
            return found[1]
        self._index[key] = block, self._next_link()
        self._keys[block] = key
        return self._index[key][1]

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one use of each. The end of a sequence goes idle first, since its beginning serves more prompts."""
        for block in reversed(blocks):
            assert self._users[block] > 0, f"block {block} is released more often than taken"
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._keys:
                self._idle[block] = None
            else:
                self._free.append(block)

    def key(self, link: int, ids: Sequence[int], number: int) -> Key:
        """What block `number` of `ids` is found by, where it stands behind `link`."""
        return link, np.array(ids[number * self.block_tokens : (number + 1) * self.block_tokens], np.int32).tobytes()

    def _next_link(self) -> int:
        self._last_link += 1
        return self._last_link
