"""What eviction promises, and a pool that is driven at random under it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pool.blocks import BlockPool
from engine.pool.eviction import LeastRecentlyUsed
from engine.protocol import TOKEN_BYTES

BLOCKS = 12


def digest_of(*path: int) -> bytes:
    return random.Random(repr(path)).randbytes(16)


@given(st.lists(st.tuples(st.sampled_from("tadpn"), st.integers(0, BLOCKS - 1)), max_size=300))
@settings(deadline=None, max_examples=60)
def test_only_candidates_go_and_every_one_of_them_does(calls: list[tuple[str, int]]) -> None:
    policy, candidates, now = LeastRecentlyUsed(BLOCKS), set[int](), 0.0
    for call, block in calls:
        if call == "n":
            now += block**3
            policy.advance(now)
        elif call == "t" and block not in candidates:
            policy.touch(block)
        elif call == "a" and block not in candidates:
            policy.add(block)
            candidates.add(block)
        elif call == "d" and block in candidates:
            policy.discard(block)
            candidates.remove(block)
        elif call == "p" and candidates:
            victim = policy.pop()
            assert victim in candidates
            candidates.remove(victim)
        assert len(policy) == len(candidates)
    while candidates:
        candidates.remove(policy.pop())
    with pytest.raises(IndexError):
        policy.pop()


def test_a_policy_that_is_empty_is_used_all_the_same() -> None:
    policy = LeastRecentlyUsed(BLOCKS)
    assert not len(policy)
    pool = BlockPool(BLOCKS, 1, policy)
    serve(pool, [1, 2, 3], 0.0)
    assert len(policy) == 1


@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=30)
def test_a_pool_stays_sound(rng: random.Random) -> None:
    pool, now = BlockPool(BLOCKS, 1), 0.0
    for _ in range(150):
        now += rng.choice((0.0, 0.1, 5.0, 600.0))
        path = [rng.randrange(3) for _ in range(rng.randint(1, BLOCKS))]
        serve(pool, path, now)
        if rng.random() < 0.05:
            pool.forget([rng.randrange(BLOCKS)])
        assert pool.check_invariants() == []
    assert pool.allocate(BLOCKS) is not None


def serve(pool: BlockPool, path: list[int], now: float) -> int:
    """One request for the blocks along a path. Returns how many were there."""
    digests = [digest_of(*path[: end + 1]) for end in range(len(path))]
    tokens = b"".join(number.to_bytes(TOKEN_BYTES, "little") for number in path)
    pool.policy.advance(now)
    reused = pool.prefixes.find("", tokens, digests)
    pool.acquire(reused)
    fresh = pool.allocate(len(path) - len(reused))
    assert fresh is not None
    table, parent = reused + fresh, reused[-1] if reused else None
    for index in range(len(reused), len(path)):
        content = tokens[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES]
        parent = pool.register(table[index], parent, "", digests[index], content)
    pool.release(table)
    return len(reused)
