"""What every eviction policy promises, held against each of them, and against a pool that is driven at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pool.blocks import BlockPool
from engine.pool.eviction import EvictionPolicy, LeastRecentlyUsed, Origin
from engine.pool.hit_density import HitDensity
from engine.protocol import TOKEN_BYTES

BLOCKS = 12
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": LeastRecentlyUsed,
    "hit-density": lambda num_blocks: HitDensity(num_blocks, 16, max_records=8),
}
every_policy = pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)


def digest_of(*path: int) -> bytes:
    return random.Random(repr(path)).randbytes(16)


@every_policy
@given(st.lists(st.tuples(st.sampled_from("tadpsn"), st.integers(0, BLOCKS - 1)), max_size=300))
@settings(deadline=None, max_examples=60)
def test_only_candidates_go_and_every_one_of_them_does(
    make: Callable[[int], EvictionPolicy], calls: list[tuple[str, int]]
) -> None:
    policy, candidates, now = make(BLOCKS), set[int](), 0.0
    for number, (call, block) in enumerate(calls):
        if call == "n":
            now += block**3
            policy.advance(now)
        elif call == "s" and block not in candidates:
            origin = Origin(prompt_tokens=100 * number)
            policy.begin(origin, [], [digest_of(block)])
            policy.store(block, -1, digest_of(block), origin)
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


@every_policy
def test_a_policy_that_is_empty_is_used_all_the_same(make: Callable[[int], EvictionPolicy]) -> None:
    policy = make(BLOCKS)
    assert not len(policy)
    pool = BlockPool(BLOCKS, 1, policy)
    serve(pool, [1, 2, 3], 0.0)
    assert len(policy) == 1


@every_policy
@given(st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=30)
def test_a_pool_stays_sound_under_each_policy(make: Callable[[int], EvictionPolicy], rng: random.Random) -> None:
    pool, now = BlockPool(BLOCKS, 1, make(BLOCKS)), 0.0
    for _ in range(150):
        now += rng.choice((0.0, 0.1, 5.0, 600.0))
        path = [rng.randrange(3) for _ in range(rng.randint(1, BLOCKS))]
        serve(pool, path, now, output_tokens=rng.choice((None, 5, 500)))
        if rng.random() < 0.05:
            pool.forget([rng.randrange(BLOCKS)])
        assert pool.check_invariants() == []
    assert pool.allocate(BLOCKS) is not None


def serve(pool: BlockPool, path: list[int], now: float, **known: Any) -> int:
    """One request for the blocks along a path. Returns how many were there."""
    output_tokens = known.pop("output_tokens", 100)
    digests = [digest_of(*path[: end + 1]) for end in range(len(path))]
    tokens = b"".join(number.to_bytes(TOKEN_BYTES, "little") for number in path)
    pool.policy.advance(now)
    reused = pool.prefixes.find("", tokens, digests)
    origin = Origin(prompt_tokens=len(path), **known)
    pool.policy.begin(origin, reused, digests)
    pool.acquire(reused)
    fresh = pool.allocate(len(path) - len(reused))
    assert fresh is not None
    table, parent = reused + fresh, reused[-1] if reused else None
    for index in range(len(reused), len(path)):
        content = tokens[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES]
        parent = pool.register(table[index], parent, "", digests[index], content, origin)
    origin.output_tokens = output_tokens
    pool.release(table)
    return len(reused)


def test_what_goes_on_quickly_is_kept_and_what_never_does_goes() -> None:
    """Long answers are never followed up here and short ones always are, ten seconds later. In between comes a flood:
    with LRU nothing is ever there."""

    def hits(policy: EvictionPolicy) -> int:
        pool, found, now = BlockPool(24, 1, policy), 0, 0.0
        for number in range(400):
            serve(pool, [1, number, 1, 1], now, output_tokens=10)
            for flood in range(12):
                now += 1.0
                serve(pool, [2, number, flood, 2], now, output_tokens=1000)
            found += serve(pool, [1, number, 1, 1, 5], now, output_tokens=1000) == 4
        return found

    assert hits(LeastRecentlyUsed(24)) == 0
    assert hits(HitDensity(24, 1)) > 200
