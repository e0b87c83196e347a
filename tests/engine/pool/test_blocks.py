"""The block pool: who holds a block, what is evicted, and what leases keep."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pool.blocks import BlockPool
from engine.pool.eviction import LeastRecentlyUsed
from engine.protocol import DIGEST_BYTES, BlockEvents, split_digests
from tests.fakes.block_pools import SIZE, chain, find, pack, store


def counts(pool: BlockPool) -> tuple[int, int, int]:
    assert pool.check_invariants() == []
    return pool.num_free, pool.num_cached, pool.num_live


def apply(table: dict[bytes, None], events: BlockEvents) -> None:
    """As a gateway does it."""
    if events.reset:
        table.clear()
    for digest in split_digests(events.removed):
        del table[digest]
    for digest in split_digests(events.stored):
        assert digest not in table
        table[digest] = None


def test_released_blocks_stay_findable_until_their_place_is_needed() -> None:
    pool = BlockPool(4, SIZE)
    pool.release(store(pool, [*range(16)]))
    assert counts(pool) == (0, 4, 0)
    assert len(find(pool, [*range(16)])) == 4
    assert pool.allocate(3) is not None
    assert len(find(pool, [*range(16)])) == 1
    assert counts(pool) == (0, 1, 3)


def test_the_tail_is_evicted_before_the_head() -> None:
    pool = BlockPool(8, SIZE)
    table = store(pool, [*range(16)])
    pool.release(table)
    for left in (3, 2, 1, 0):
        pool.allocate(pool.num_free + 1)
        assert find(pool, [*range(16)]) == table[:left]


def test_the_prefix_used_longest_ago_goes_whole_before_the_next_one_loses_its_tail() -> None:
    pool = BlockPool(8, SIZE)
    old, new = [*range(16)], [*range(100, 116)]
    pool.release(store(pool, old))
    pool.release(store(pool, new))
    pool.allocate(4)
    assert (len(find(pool, old)), len(find(pool, new))) == (0, 4)


def test_a_hit_makes_a_prefix_the_most_recently_used() -> None:
    pool = BlockPool(8, SIZE)
    old, new = [*range(16)], [*range(100, 116)]
    pool.release(store(pool, old))
    pool.release(store(pool, new))
    hit = find(pool, old)
    pool.acquire(hit)
    pool.release(hit)
    pool.allocate(4)
    assert (len(find(pool, old)), len(find(pool, new))) == (4, 0)


def test_a_parent_stays_while_a_child_is_live() -> None:
    """A sequence may hold a child without its parent: one whose own copy of the parent stayed private."""
    pool = BlockPool(4, SIZE)
    first, second = store(pool, [*range(8)])
    pool.release([first])
    assert counts(pool) == (2, 1, 1)
    assert pool.available == 2
    assert pool.allocate(3) is None
    pool.release([second])
    assert pool.available == 4


def test_an_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4, SIZE)
    held = store(pool, [*range(8)])
    before = counts(pool)
    assert pool.allocate(3) is None
    assert counts(pool) == before
    assert pool.allocate(0) == []
    assert len(pool.allocate(2) or []) == 2
    assert find(pool, [*range(8)]) == held


def test_a_block_of_two_sequences_is_live_until_both_let_go() -> None:
    pool = BlockPool(4, SIZE)
    table = store(pool, [*range(8)])
    pool.acquire(table)
    pool.release(table)
    assert counts(pool) == (2, 0, 2)
    pool.release(table)
    assert counts(pool) == (2, 2, 0)


def test_releasing_too_often_is_caught() -> None:
    pool = BlockPool(4, SIZE)
    table = store(pool, [*range(8)])
    pool.release(table)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(table)


def test_private_blocks_are_free_after_release() -> None:
    pool = BlockPool(4, SIZE)
    pool.release(pool.allocate(3) or [])
    assert counts(pool) == (4, 0, 0)


def test_a_second_copy_stays_private_and_names_the_first() -> None:
    pool = BlockPool(8, SIZE)
    (first,) = store(pool, [*range(4)])
    (second,) = pool.allocate(1) or []
    assert pool.register(second, None, "", chain([*range(4)])[0], pack([*range(4)])) == first
    pool.release([second])
    assert counts(pool) == (7, 0, 1)


def test_forgotten_blocks_take_their_descendants_with_them() -> None:
    pool = BlockPool(8, SIZE)
    first = store(pool, [*range(12)])
    branch = store(pool, [*range(4), 9, 9, 9, 9])
    pool.release(first)
    assert pool.forget([first[1]]) == 2
    assert find(pool, [*range(12)]) == first[:1]
    assert find(pool, [*range(4), 9, 9, 9, 9]) == branch
    assert pool.forget(first) == 2
    assert counts(pool) == (6, 0, 2)
    pool.release(branch)
    assert counts(pool) == (8, 0, 0)


def test_a_forgotten_parent_without_readers_is_freed_under_a_live_child() -> None:
    pool = BlockPool(4, SIZE)
    first, second = store(pool, [*range(8)])
    pool.release([first])
    assert pool.forget([first]) == 2
    assert counts(pool) == (3, 0, 1)
    pool.release([second])
    assert counts(pool) == (4, 0, 0)


def test_ids_that_were_used_before_are_used_first() -> None:
    pool = BlockPool(1 << 15, SIZE)
    for _ in range(20):
        tables = [pool.allocate(2) or [] for _ in range(12)]
        for _ in range(60):
            for table in tables:
                table += pool.allocate(1) or []
        assert max(map(max, tables)) == 12 * 62 - 1, "each other block would touch memory that is not resident yet"
        for table in tables:
            pool.release(table)


@given(st.lists(st.tuples(st.sampled_from("tadp"), st.integers(0, 9)), max_size=300))
@settings(deadline=None, max_examples=60)
def test_the_least_recently_used_leaf_goes_first(calls: list[tuple[str, int]]) -> None:
    policy, candidates, used = LeastRecentlyUsed(10), set[int](), dict.fromkeys(range(10), 0)
    for time, (call, block) in enumerate(calls):
        if call == "t" and block not in candidates:
            policy.touch(block)
            used[block] = time + 1
        elif call == "a" and block not in candidates:
            policy.add(block)
            candidates.add(block)
        elif call == "d" and block in candidates:
            policy.discard(block)
            candidates.remove(block)
        elif call == "p" and candidates:
            victim = policy.pop()
            assert victim == min(candidates, key=lambda b: (used[b], b))
            candidates.remove(victim)
        assert len(policy) == len(candidates)
    while candidates:
        candidates.remove(policy.pop())
    with pytest.raises(IndexError):
        policy.pop()


def test_a_pool_evicts_what_its_policy_chooses() -> None:
    class Last(LeastRecentlyUsed):
        def pop(self) -> int:
            block = max(block for block, is_leaf in enumerate(self._candidate) if is_leaf)
            self.discard(block)
            return block

    pool = BlockPool(2, SIZE, Last(2))
    pool.release(store(pool, [0, 0, 0, 0]))
    pool.release(store(pool, [1, 1, 1, 1]))
    assert pool.allocate(1) == [1], "the least recently used one is 0"


def test_a_lease_keeps_a_block_and_what_it_hangs_from_until_it_ends() -> None:
    pool = BlockPool(8, SIZE)
    table = store(pool, [*range(16)])
    pool.lease(table[2])
    pool.release(table)
    assert counts(pool) == (4, 4, 0)
    assert pool.available == 5
    assert pool.allocate(6) is None
    others = pool.allocate(5)
    assert others is not None
    assert find(pool, [*range(16)]) == table[:3]
    pool.end_lease(table[2])
    assert pool.available == 3
    assert pool.allocate(3) is not None
    assert find(pool, [*range(16)]) == []


def test_leases_of_one_block_add_up_and_nest() -> None:
    pool = BlockPool(4, SIZE)
    table = store(pool, [*range(16)])
    pool.release(table)
    for block in (table[1], table[3], table[3]):
        pool.lease(block)
    assert pool.available == 0
    pool.end_lease(table[3])
    assert (pool.available, pool.is_leased(table[3])) == (0, True)
    pool.end_lease(table[3])
    assert (pool.available, pool.is_leased(table[3])) == (2, False)
    pool.acquire(table)
    pool.end_lease(table[1])
    assert (pool.available, pool.num_live) == (0, 4)
    pool.release(table)
    assert (pool.available, counts(pool)) == (4, (0, 4, 0))


def test_the_end_of_a_lease_is_no_use_of_the_block() -> None:
    """A prefix that nobody asked for again is not to outlive one that was used after it."""
    pool = BlockPool(8, SIZE)
    leased, newer = [*range(16)], [*range(100, 116)]
    table = store(pool, leased)
    pool.lease(table[3])
    pool.release(table)
    pool.release(store(pool, newer))
    pool.end_lease(table[3])
    pool.allocate(4)
    assert (len(find(pool, leased)), len(find(pool, newer))) == (0, 4)


def test_blocks_that_are_forgotten_are_not_leased_any_more() -> None:
    pool = BlockPool(8, SIZE)
    table = store(pool, [*range(16)])
    pool.lease(table[0])
    pool.lease(table[2])
    pool.release(table[3:])
    assert pool.forget([table[1]]) == 3
    assert (pool.is_leased(table[0]), pool.is_leased(table[2])) == (True, False)
    pool.release(table[:3])
    assert counts(pool) == (7, 1, 0)
    assert pool.available == 7


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_a_busy_pool_stays_sound_and_its_events_add_up(rng: random.Random) -> None:
    pool, tables, told = BlockPool(rng.randint(4, 24), SIZE), list[list[int]](), dict[bytes, None]()
    leased: list[tuple[int, list[int]]] = []  # a block, and the tokens up to its end
    prompts = [[rng.randrange(2) for _ in range(SIZE * rng.randint(1, 6))] for _ in range(12)]
    for _ in range(120):
        roll = rng.random()
        if roll < 0.5:
            tokens = rng.choice(prompts)
            missing = len(tokens) // SIZE - len(hit := find(pool, tokens))
            if pool.available_beside(hit) >= missing:
                tables.append(store(pool, tokens))
        elif roll < 0.9 and tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        elif tables and rng.random() < 0.3:
            pool.forget([rng.choice(rng.choice(tables))])
            leased = [(block, tokens) for block, tokens in leased if pool.is_leased(block)]
        if rng.random() < 0.2 and (hit := find(pool, tokens := rng.choice(prompts))):
            pool.lease(hit[-1])
            leased.append((hit[-1], tokens[: len(hit) * SIZE]))
        elif rng.random() < 0.2 and leased:
            pool.end_lease(leased.pop(rng.randrange(len(leased)))[0])
        for block, tokens in leased:
            assert find(pool, tokens)[-1] == block
        if rng.random() < 0.3:
            apply(told, pool.prefixes.take_events())
            assert set(told) == set(split_digests(pool.prefixes.snapshot().stored))
        free, cached, live = counts(pool)
        assert free + cached + live == pool.num_blocks
    for table in tables:
        pool.release(table)
    for block, _ in leased:
        pool.end_lease(block)
    assert pool.available == pool.num_blocks
    apply(told, pool.prefixes.take_events())
    assert len(told) * DIGEST_BYTES == len(pool.prefixes.snapshot().stored)
    assert pool.num_live == 0
