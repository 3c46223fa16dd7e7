"""The block pool: what is found again, what is lost first."""

from everlong.engines.torch_engine.blocks import BlockPool


def store_prompt(pool, ids, version=1):
    """Take blocks for `ids`, index the full ones; the blocks."""
    blocks, link = pool.find(pool.root(version), ids, len(ids) // pool.block_tokens)
    known = len(blocks)
    blocks += pool.take(pool.blocks_for(len(ids)) - known)
    for number in range(known, len(ids) // pool.block_tokens):
        link = pool.index(link, ids, number, blocks[number])
    return blocks


def test_a_prefix_is_found_block_by_block_and_shared():
    pool = BlockPool(8, 2)
    first = store_prompt(pool, [1, 2, 3, 4, 5])
    second = store_prompt(pool, [1, 2, 3, 4, 9, 9])
    assert second[:2] == first[:2]
    assert second[2] != first[2]
    assert pool.num_available == 8 - 4


def test_the_same_block_after_another_prefix_is_not_found():
    pool = BlockPool(8, 2)
    store_prompt(pool, [1, 2, 3, 4])
    assert pool.find(pool.root(1), [7, 7, 3, 4], 2)[0] == []


def test_another_version_finds_nothing():
    pool = BlockPool(8, 2)
    store_prompt(pool, [1, 2, 3, 4], version=1)
    assert pool.find(pool.root(2), [1, 2, 3, 4], 2)[0] == []


def test_prefixes_whose_hashes_collide_are_told_apart(monkeypatch):
    class Colliding(bytes):
        def __hash__(self):
            return 0

    pool = BlockPool(8, 2)
    key = pool.key

    def colliding(link, ids, number):
        return link, Colliding(key(link, ids, number)[1])

    monkeypatch.setattr(pool, "key", colliding)
    first, second = store_prompt(pool, [1, 2]), store_prompt(pool, [3, 4])
    pool.release(first + second)
    assert pool.find(pool.root(1), [3, 4], 1)[0] == second
    assert pool.find(pool.root(1), [1, 2], 1)[0] == first


def test_released_blocks_are_found_until_memory_is_needed_and_the_oldest_end_goes_first():
    pool = BlockPool(4, 2)
    pool.release(store_prompt(pool, [1, 2, 3, 4]))
    pool.release(store_prompt(pool, [5, 6]))
    assert pool.num_available == 4
    pool.release(pool.take(2))  # one was free, the other comes from the end of what was released first
    found, _ = pool.find(pool.root(1), [1, 2, 3, 4], 2)
    assert len(found) == 1
    assert len(pool.find(pool.root(1), [5, 6], 1)[0]) == 1


def test_two_who_compute_the_same_prefix_at_once_share_what_comes_behind():
    pool = BlockPool(8, 2)
    twin_a, twin_b = pool.take(2), pool.take(2)
    ids = [1, 2, 3, 4]
    link_a, link_b = pool.root(1), pool.root(1)
    for number in range(2):
        link_a = pool.index(link_a, ids, number, twin_a[number])
        link_b = pool.index(link_b, ids, number, twin_b[number])
    assert link_a == link_b
    pool.release(twin_b)
    assert pool.find(pool.root(1), ids, 2)[0] == twin_a
