"""What registered blocks hold: which prefix is found, and what the index is told."""

from __future__ import annotations

from engine.pool.blocks import BlockPool
from engine.protocol import BlockEvents, split_digests
from tests.fakes.block_pools import SIZE, chain, find, pack, store


def test_a_stored_prefix_is_found_as_far_as_it_agrees() -> None:
    pool = BlockPool(8, SIZE)
    table = store(pool, [*range(12)])
    assert find(pool, [*range(12)]) == table
    assert find(pool, [*range(14)]) == table
    assert find(pool, [*range(8), 99, 9, 10, 11]) == table[:2]
    assert find(pool, [99, *range(1, 12)]) == []


def test_another_salt_never_finds_a_block_even_with_its_digest() -> None:
    pool = BlockPool(4, SIZE)
    tokens = [*range(8)]
    store(pool, tokens, salt="tenant:a")
    assert pool.prefixes.find("tenant:b", pack(tokens), chain(tokens)) == []
    assert len(pool.prefixes.find("tenant:a", pack(tokens), chain(tokens))) == 2


def test_a_forged_digest_finds_nothing_with_other_tokens() -> None:
    pool = BlockPool(4, SIZE)
    store(pool, [*range(8)])
    stolen = chain([*range(8)])
    assert pool.prefixes.find("", pack([9] * 8), stolen) == []
    assert pool.prefixes.find("", pack([0, 1, 2, 3, 9, 9, 9, 9]), stolen) == find(pool, [*range(4)])


def test_equal_tokens_behind_another_parent_are_another_prefix() -> None:
    pool = BlockPool(8, SIZE)
    store(pool, [1, 1, 1, 1, 5, 5, 5, 5])
    other = store(pool, [2, 2, 2, 2])
    second = chain([1, 1, 1, 1, 5, 5, 5, 5])[1]
    forged = [*chain([2, 2, 2, 2]), second]
    assert pool.prefixes.find("", pack([2, 2, 2, 2, 5, 5, 5, 5]), forged) == other


def test_a_root_block_is_not_taken_for_an_inner_one() -> None:
    pool = BlockPool(8, SIZE)
    store(pool, [5, 5, 5, 5], digests=[b"x" * 16])
    other = store(pool, [1, 1, 1, 1])
    assert pool.prefixes.find("", pack([1, 1, 1, 1, 5, 5, 5, 5]), [chain([1] * 4)[0], b"x" * 16]) == other


def test_an_inner_block_is_not_taken_for_a_root() -> None:
    pool = BlockPool(8, SIZE)
    store(pool, [1, 1, 1, 1, 5, 5, 5, 5])
    inner = chain([1, 1, 1, 1, 5, 5, 5, 5])[1]
    assert pool.prefixes.find("", pack([5, 5, 5, 5]), [inner]) == []


def test_a_colliding_newcomer_is_not_registered() -> None:
    pool = BlockPool(8, SIZE)
    table = store(pool, [*range(4)])
    (newcomer,) = pool.allocate(1) or []
    assert pool.register(newcomer, None, "", chain([*range(4)])[0], pack([9] * 4)) is None
    assert pool.register(newcomer, None, "other", chain([*range(4)])[0], pack([*range(4)])) is None
    assert find(pool, [*range(4)]) == table


def test_an_evicted_id_that_is_filled_anew_is_no_parent_of_the_old_child() -> None:
    pool = BlockPool(2, SIZE)
    old = [*range(8)]
    pool.release(store(pool, old))
    pool.release(store(pool, [9, 9, 9, 9, 8, 8, 8, 8]))
    assert find(pool, old) == []
    assert pool.prefixes.find("", pack(old), [chain([9] * 4)[0], chain(old)[1]]) == []


def test_events_name_parents_first_when_stored_and_children_first_when_removed() -> None:
    pool = BlockPool(4, SIZE)
    tokens = [*range(16)]
    pool.release(store(pool, tokens))
    assert split_digests(pool.prefixes.take_events().stored) == chain(tokens)
    pool.allocate(4)
    assert split_digests(pool.prefixes.take_events().removed) == chain(tokens)[::-1]
    assert pool.prefixes.take_events() == BlockEvents()


def test_what_came_and_went_between_two_takes_is_not_told() -> None:
    pool = BlockPool(4, SIZE)
    tokens = [*range(16)]
    pool.release(store(pool, tokens))
    pool.release(pool.allocate(4) or [])
    assert pool.prefixes.take_events() == BlockEvents()
    pool.release(store(pool, tokens))
    pool.prefixes.take_events()
    pool.release(pool.allocate(4) or [])
    pool.release(store(pool, tokens[:8]))
    assert split_digests(pool.prefixes.take_events().removed) == chain(tokens)[:1:-1]


def test_a_snapshot_holds_what_can_be_found_parents_first() -> None:
    pool = BlockPool(8, SIZE)
    pool.release(store(pool, [*range(16)]))
    pool.release(store(pool, [*range(100, 116)]))
    pool.allocate(2)
    snapshot = pool.prefixes.snapshot()
    assert snapshot.reset
    assert split_digests(snapshot.stored) == [*chain([*range(16)])[:2], *chain([*range(100, 116)])]
