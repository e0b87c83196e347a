"""Leases over block pools: what is kept, for how long, and what gives way. Time is a number here."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.leases.leases import MAX_TENANTS_SHOWN, Leases
from engine.leases.pins import Lease
from engine.pool.blocks import BlockPool
from engine.protocol import Namespace, split_digests
from tests.fakes.scheduler_bench import SIZE, digests_of, pack

ROOT = Namespace(weights="w", dtype="float32", kv_dtype="float32", block_size=SIZE).root()


def chain(tokens: list[int], salt: str = "") -> list[bytes]:
    return split_digests(digests_of(tokens, salt))


class Shelf:
    """A pool with leases, and prompts that are stored in it at once."""

    def __init__(self, num_blocks: int = 100, *, slower: int = 0, **changes: float) -> None:
        values = {"share": 0.5, "tenant_share": 0.5, "max_leases": 100} | changes
        self.pool = BlockPool(num_blocks, SIZE)
        self.slower = BlockPool(slower, SIZE) if slower else None
        self.leases = Leases(
            {"device": self.pool} | ({"host": self.slower} if self.slower else {}),
            share=values["share"],
            tenant_share=values["tenant_share"],
            max_leases=int(values["max_leases"]),
        )

    def store(
        self,
        tokens: list[int],
        salt: str = "",
        pool: BlockPool | None = None,
        digests: list[bytes] | None = None,
    ) -> list[int]:
        """Makes the full blocks of a prompt findable; nobody holds them."""
        pool = pool or self.pool
        digests = digests or chain(tokens, salt)
        table = pool.prefixes.find(salt, pack(tokens), digests)
        pool.acquire(table)
        fresh = pool.allocate(len(digests) - len(table))
        assert fresh is not None
        for block in fresh:
            index = len(table)
            content = pack(tokens[index * SIZE : (index + 1) * SIZE])
            assert pool.register(block, table[-1] if table else None, salt, digests[index], content) == block
            table.append(block)
        pool.release(table)
        return table

    def grant(
        self, tokens: list[int], ttl_s: float = 100.0, *, at: float = 0.0, tenant: str = "t", salt: str = ""
    ) -> Lease:
        """A request computes a prompt and keeps it."""
        self.store(tokens, salt)
        lease = self.leases.grant(tenant, salt, pack(tokens), chain(tokens, salt), ttl_s, arrived_s=at, now=at)
        self.check()
        return lease

    def use(self, tokens: list[int], *, at: float = 0.0, salt: str = "") -> int:
        """A request begins with these tokens. Returns what it reads."""
        self.leases.expire(at)
        found = self.leases.find(salt, pack(tokens), chain(tokens, salt))
        self.leases.renew(found, at)
        read = self.leases.read(found, salt, pack(tokens), chain(tokens, salt))
        self.check()
        return read

    def found(self, tokens: list[int], salt: str = "") -> int:
        """Blocks of a prompt that are there."""
        return len(self.pool.prefixes.find(salt, pack(tokens), chain(tokens, salt)))

    def flood(self) -> None:
        """Others want every block they can get."""
        self.pool.release(self.pool.allocate(self.pool.available) or [])

    def check(self) -> None:
        assert self.pool.check_invariants() + self.leases.check_invariants() == []


def prompt(length: int, kind: int = 0) -> list[int]:
    return [kind * 1000 + i for i in range(length)]


# -- time -------------------------------------------------------------------------------------------------------------


def test_a_leased_prefix_outlives_a_flood_until_its_time_is_up() -> None:
    shelf = Shelf()
    shelf.grant(prompt(40), 100.0)
    shelf.store(prompt(40, 1))
    shelf.flood()
    assert (shelf.found(prompt(40)), shelf.found(prompt(40, 1))) == (10, 0)
    assert shelf.leases.expire(99.9) == 0
    assert shelf.leases.expire(100.0) == 1
    shelf.flood()
    assert (shelf.found(prompt(40)), len(shelf.leases), shelf.leases.num_blocks()) == (0, 0, 0)


def test_every_use_renews_the_lease_and_those_it_contains() -> None:
    shelf = Shelf()
    short, long = shelf.grant(prompt(20), 100.0), shelf.grant(prompt(40), 200.0)
    assert shelf.use([*prompt(40), 7], at=50.0) == 40
    assert (short.expires_s, long.expires_s) == (150.0, 250.0)
    assert shelf.use([*prompt(30), 7], at=80.0) == 20
    assert (short.expires_s, long.expires_s) == (180.0, 250.0)
    assert shelf.leases.counters.renewed == 3
    assert shelf.leases.expire(179.0) == 0
    assert shelf.leases.expire(180.0) == 1
    assert shelf.leases.expire(249.0) == 0
    assert shelf.leases.expire(250.0) == 1


def test_a_use_after_the_end_renews_nothing() -> None:
    shelf = Shelf()
    shelf.grant(prompt(40), 100.0)
    assert shelf.use(prompt(50), at=100.0) == 0
    assert len(shelf.leases) == 0


def test_a_breakpoint_that_is_asked_for_again_is_one_lease_and_the_longer_time_wins() -> None:
    shelf = Shelf()
    first = shelf.grant(prompt(40), 300.0)
    assert shelf.grant(prompt(40), 100.0, at=50.0) is first
    assert (first.ttl_s, first.expires_s) == (300.0, 350.0)
    assert shelf.grant(prompt(40), 1000.0, at=60.0) is first
    assert (first.ttl_s, first.expires_s, len(shelf.leases)) == (1000.0, 1060.0, 1)


def test_a_request_that_took_longer_than_its_lease_lasts_has_none() -> None:
    shelf = Shelf()
    shelf.store(prompt(8))
    lease = shelf.leases.grant("t", "", pack(prompt(8)), chain(prompt(8)), 5.0, arrived_s=0.0, now=6.0)
    assert (lease.state, len(shelf.leases), shelf.leases.counters.expired) == ("expired", 0, 1)


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_a_lease_is_read_to_the_token() -> None:
    shelf = Shelf()
    shelf.grant(prompt(22))
    assert shelf.use(prompt(22)) == 22
    assert shelf.use([*prompt(22), 9]) == 22
    assert shelf.use(prompt(21)) == 0
    assert shelf.use([*prompt(21), 9, 9, 9]) == 0
    assert shelf.leases.num_blocks() == 5


def test_breakpoints_within_one_block_are_leases_of_their_own() -> None:
    shelf = Shelf()
    a, b, c = shelf.grant(prompt(20)), shelf.grant([*prompt(20), 1]), shelf.grant([*prompt(20), 2, 3])
    assert len({a, b, c}) == 3
    assert shelf.use([*prompt(20), 2, 3, 4]) == 22
    assert shelf.use([*prompt(20), 1, 3, 4]) == 21
    assert shelf.use([*prompt(20), 5]) == 20
    assert shelf.leases.counters.renewed == 5


def test_a_prefix_of_less_than_a_block_is_a_lease_that_keeps_no_block() -> None:
    shelf = Shelf()
    lease = shelf.grant([5, 6, 7])
    assert (lease.state, shelf.leases.num_blocks()) == ("kept", 0)
    assert shelf.use([5, 6, 7, 8, 9]) == 3
    assert shelf.use([5, 6, 7], salt="other") == 0


def test_leases_of_another_salt_are_not_found() -> None:
    shelf = Shelf()
    shelf.grant(prompt(20), salt="a")
    assert not shelf.leases.any_of("b")
    assert shelf.use(prompt(20), salt="b") == 0
    assert shelf.leases.find("a", pack(prompt(20)), chain(prompt(20), "b")) == []


def test_tenants_that_share_a_salt_pay_and_renew_together() -> None:
    shelf = Shelf()
    a, b = shelf.grant(prompt(20), tenant="a", salt="s"), shelf.grant(prompt(20), tenant="b", salt="s")
    assert a is not b
    assert shelf.use(prompt(20), at=10.0, salt="s") == 20
    assert (a.expires_s, b.expires_s) == (110.0, 110.0)
    assert shelf.leases.num_blocks() == 5
    assert shelf.leases.stats()["tenants"] == {"a": {"blocks": 5}, "b": {"blocks": 5}}


def test_a_digest_that_stands_for_other_tokens_reads_nothing() -> None:
    shelf = Shelf()
    shelf.grant(prompt(20))
    forged = chain(prompt(20))
    found = shelf.leases.find("", pack(prompt(20, 1)), forged)
    assert len(found) == 1
    assert shelf.leases.read(found, "", pack(prompt(20, 1)), forged) == 0


def test_a_degraded_lease_is_not_revived_by_a_digest_that_stands_for_other_tokens() -> None:
    shelf = Shelf()
    lease = shelf.grant(prompt(20))
    forged, other = chain(prompt(20)), pack(prompt(20, 1))
    shelf.leases.give_way(0.0)
    shelf.flood()
    shelf.store(prompt(20, 1), digests=forged)
    found = shelf.leases.find("", other, forged)
    assert found == [lease]
    assert shelf.leases.read(found, "", other, forged) == 0
    assert not shelf.leases.keep_again(lease, other, forged, 1.0)
    new = shelf.leases.grant("t", "", other, forged, 100.0, arrived_s=1.0, now=1.0)
    assert (new.state, lease.state, len(shelf.leases)) == ("kept", "dropped", 1)
    assert shelf.leases.read([new], "", other, forged) == 20
    shelf.check()


# -- budgets ----------------------------------------------------------------------------------------------------------


def test_leases_that_nest_count_each_block_once() -> None:
    shelf = Shelf(share=0.1, tenant_share=0.1)
    for length in (8, 20, 40):
        assert shelf.grant(prompt(length)).state == "kept"
    assert shelf.leases.num_blocks() == 10


def test_past_the_budget_the_one_with_the_smallest_share_of_its_time_left_degrades() -> None:
    shelf = Shelf(share=0.1, tenant_share=0.1)
    idle = shelf.grant(prompt(20), 1000.0)
    recent = shelf.grant(prompt(20, 1), 100.0, at=190.0)
    new = shelf.grant(prompt(16, 2), 100.0, at=200.0)
    assert [lease.state for lease in (idle, recent, new)] == ["degraded", "kept", "kept"]
    assert (shelf.leases.num_blocks(), shelf.leases.counters.degraded) == (9, 1)
    shelf.flood()
    assert [shelf.found(prompt(20, kind)) for kind in (0, 1, 2)] == [0, 5, 4]


def test_of_two_with_the_same_share_left_the_larger_degrades() -> None:
    shelf = Shelf(share=0.1, tenant_share=0.1)
    small, large = shelf.grant(prompt(12)), shelf.grant(prompt(28, 1))
    shelf.grant(prompt(8, 2), at=10.0)
    assert (small.state, large.state) == ("kept", "degraded")


def test_a_lease_that_exceeds_the_budget_alone_degrades_itself_and_no_other() -> None:
    shelf = Shelf(share=0.5, tenant_share=0.1)
    other = shelf.grant(prompt(40))
    large = shelf.grant(prompt(44, 1), at=50.0)
    assert (other.state, large.state) == ("kept", "degraded")


def test_a_lease_worth_no_more_than_the_others_makes_nobody_degrade() -> None:
    shelf = Shelf(share=0.1, tenant_share=0.1)
    other = shelf.grant(prompt(40), at=5.0)
    late = shelf.grant(prompt(20, 1), at=5.0)
    assert (other.state, late.state) == ("degraded", "kept")  # of equals the larger one
    later = shelf.leases.grant("t", "", pack(prompt(40)), chain(prompt(40)), 100.0, arrived_s=0.0, now=5.0)
    assert (late.state, later.state) == ("kept", "degraded")


def test_what_hangs_below_goes_before_what_it_hangs_from() -> None:
    """The short lease has the smaller share of its time left, but to end it would free nothing."""
    shelf = Shelf(share=0.1, tenant_share=0.1)
    short, long = shelf.grant(prompt(20), 10.0), shelf.grant(prompt(32), 1000.0)
    new = shelf.grant(prompt(20, 1), at=5.0)
    assert [lease.state for lease in (short, long, new)] == ["kept", "degraded", "kept"]
    assert shelf.leases.num_blocks() == 10


def test_leases_that_end_in_one_block_degrade_together() -> None:
    shelf = Shelf(share=0.1, tenant_share=0.1)
    a, b = shelf.grant([*prompt(32), 1]), shelf.grant([*prompt(32), 2])
    new = shelf.grant(prompt(20, 1), at=5.0)
    assert [lease.state for lease in (a, b, new)] == ["degraded", "degraded", "kept"]


def test_a_longer_lease_does_not_degrade_the_one_it_grows_from() -> None:
    shelf = Shelf(share=0.1, tenant_share=0.1)
    before = shelf.grant(prompt(20), 1000.0)
    other = shelf.grant(prompt(12, 1), 100.0, at=10.0)
    grown = shelf.grant(prompt(40), 100.0, at=11.0)
    assert [lease.state for lease in (before, other, grown)] == ["kept", "degraded", "kept"]


def test_a_tenant_past_its_share_degrades_its_own_leases() -> None:
    shelf = Shelf(share=0.5, tenant_share=0.1)
    other = shelf.grant(prompt(40), tenant="a")
    mine = shelf.grant(prompt(40, 1), tenant="b", at=5.0)
    new = shelf.grant(prompt(40, 2), tenant="b", at=50.0)
    assert [lease.state for lease in (other, mine, new)] == ["kept", "degraded", "kept"]


def test_all_tenants_together_have_a_budget() -> None:
    shelf = Shelf(share=0.2, tenant_share=0.1)
    leases = [shelf.grant(prompt(40, kind), tenant=f"t{kind}", at=float(kind)) for kind in range(4)]
    assert [lease.state for lease in leases] == ["degraded", "degraded", "kept", "kept"]
    assert shelf.leases.num_blocks() == 20


def test_a_degraded_lease_that_is_used_again_is_kept_again_if_it_fits() -> None:
    shelf = Shelf(share=0.1, tenant_share=0.1)
    lease = shelf.grant(prompt(40), 1000.0)
    other = shelf.grant(prompt(20, 1), 100.0, at=10.0)
    assert (lease.state, shelf.use(prompt(40), at=20.0)) == ("degraded", 40)
    assert not shelf.leases.keep_again(lease, pack(prompt(40)), chain(prompt(40)), 20.0)
    assert other.state == "kept"
    shelf.leases.expire(110.0)
    assert shelf.leases.keep_again(lease, pack(prompt(40)), chain(prompt(40)), 110.0)
    assert (lease.state, shelf.leases.num_blocks(), shelf.leases.counters.kept_again) == ("kept", 10, 1)
    shelf.check()


def test_a_degraded_lease_that_was_evicted_is_not_read_until_it_is_computed_again() -> None:
    shelf = Shelf(share=0.1, tenant_share=0.1)
    lease = shelf.grant(prompt(40), 1000.0)
    shelf.grant(prompt(20, 1), 100.0, at=10.0)
    shelf.flood()
    assert shelf.use(prompt(40), at=20.0) == 0
    assert (len(shelf.leases), lease.expires_s) == (2, 1020.0)
    assert shelf.grant(prompt(40), 1000.0, at=30.0) is lease
    assert lease.state == "kept"


def test_leases_are_limited_in_number_for_each_tenant_and_for_all() -> None:
    shelf = Shelf(max_leases=4, tenant_share=0.5)
    mine = [shelf.grant([kind], tenant="a", at=float(kind)) for kind in range(3)]
    assert [lease.state for lease in mine] == ["dropped", "kept", "kept"]
    shelf.grant([10], tenant="b", at=10.0)
    shelf.grant([11], tenant="b", at=11.0)
    shelf.grant([12], tenant="c", at=12.0)
    assert [lease.state for lease in mine] == ["dropped", "dropped", "kept"]
    assert (len(shelf.leases), shelf.leases.counters.dropped) == (4, 2)


def test_degraded_leases_are_dropped_before_kept_ones() -> None:
    shelf = Shelf(share=0.1, tenant_share=0.1, max_leases=20)  # two for each tenant
    kept, degraded = shelf.grant(prompt(8), 100.0), shelf.grant(prompt(44, 1), 100.0, at=50.0)
    shelf.grant(prompt(8, 2), at=60.0)
    assert (kept.state, degraded.state) == ("kept", "dropped")


def test_a_new_lease_among_too_many_of_equal_value_is_the_one_that_is_dropped() -> None:
    shelf = Shelf(max_leases=2, tenant_share=1.0)
    kept = [shelf.grant(prompt(8, kind)) for kind in range(2)]
    assert shelf.grant(prompt(8, 2)).state == "dropped"
    assert [lease.state for lease in kept] == ["kept", "kept"]


# -- giving way, being lost, moving down ------------------------------------------------------------------------------


def test_leases_give_way_one_after_the_other_until_none_is_left() -> None:
    shelf = Shelf()
    old, new = shelf.grant(prompt(40), 100.0), shelf.grant(prompt(40, 1), 100.0, at=50.0)
    assert shelf.pool.available == 80
    assert shelf.leases.give_way(60.0)
    assert (old.state, new.state, shelf.pool.available) == ("degraded", "kept", 90)
    assert shelf.leases.give_way(60.0)
    assert (new.state, shelf.pool.available) == ("degraded", 100)
    assert not shelf.leases.give_way(60.0)
    shelf.check()


def test_leases_of_forgotten_blocks_are_lost_and_the_others_stay() -> None:
    shelf = Shelf()
    short, long = shelf.grant(prompt(20)), shelf.grant(prompt(40), tenant="u")
    shelf.pool.forget([shelf.store(prompt(40))[6]])
    assert shelf.leases.drop_lost() == 1
    assert shelf.leases.drop_lost() == 0
    assert (short.state, long.state) == ("kept", "degraded")
    assert (shelf.leases.num_blocks(), shelf.leases.counters.lost) == (5, 1)
    shelf.check()
    assert shelf.use(prompt(40)) == 20
    assert shelf.grant(prompt(40), tenant="u") is long
    assert long.state == "kept"


def test_a_lease_moves_down_when_its_blocks_are_saved_there() -> None:
    shelf = Shelf(slower=100)
    lease = shelf.grant(prompt(42))
    assert (shelf.leases.num_blocks(0), shelf.leases.num_blocks(1)) == (10, 0)
    shelf.store(prompt(40), pool=shelf.slower)
    shelf.leases.saved(1, chain(prompt(40)), 1.0)
    shelf.check()
    assert (lease.tier, shelf.leases.num_blocks(0), shelf.leases.num_blocks(1)) == (1, 0, 10)
    shelf.flood()
    assert shelf.found(prompt(40)) == 0
    assert shelf.use(prompt(50), at=2.0) == 42
    assert shelf.leases.stats()["blocks"] == {"device": 0, "host": 10}
    shelf.leases.expire(1000.0)
    assert shelf.slower is not None
    assert shelf.slower.available == 100


def test_a_lease_does_not_move_to_a_block_that_has_its_digest_and_other_tokens() -> None:
    shelf = Shelf(slower=100)
    lease = shelf.grant(prompt(40))
    shelf.store(prompt(40, 1), pool=shelf.slower, digests=chain(prompt(40)))
    shelf.leases.saved(1, chain(prompt(40)), 1.0)
    assert (lease.state, lease.tier) == ("kept", 0)
    shelf.check()


def test_a_lease_does_not_move_to_a_block_that_has_its_digest_and_another_salt() -> None:
    shelf = Shelf(slower=100)
    lease = shelf.grant(prompt(40), salt="mine")
    shelf.store(prompt(40), "other", pool=shelf.slower, digests=chain(prompt(40), "mine"))
    shelf.leases.saved(1, chain(prompt(40), "mine"), 1.0)
    assert (lease.state, lease.tier) == ("kept", 0)
    shelf.check()


def test_a_lease_is_granted_in_the_lowest_pool_that_holds_it() -> None:
    shelf = Shelf(slower=100)
    shelf.store(prompt(40), pool=shelf.slower)
    assert shelf.grant(prompt(40)).tier == 1
    assert shelf.grant(prompt(44)).tier == 0


def test_a_lease_that_is_too_large_above_is_kept_where_it_fits() -> None:
    shelf = Shelf(20, slower=100)
    lease, other = shelf.grant(prompt(46)), shelf.grant(prompt(46, 1), tenant="u")
    assert (lease.state, other.state) == ("degraded", "degraded")
    assert shelf.slower is not None
    shelf.store(prompt(46), pool=shelf.slower)
    shelf.store([*prompt(40), *prompt(4, 2)], digests=chain(prompt(44, 1)), pool=shelf.slower)
    for kind in (0, 1):
        shelf.leases.saved(1, chain(prompt(46, kind)), 1.0)
    shelf.check()
    assert (lease.state, lease.tier, shelf.leases.num_blocks(1)) == ("kept", 1, 11)
    assert other.state == "degraded", "its digest stands for other tokens there"


def test_a_lease_that_does_not_fit_below_stays_where_it_is() -> None:
    shelf = Shelf(slower=16)
    first, second = shelf.grant(prompt(20)), shelf.grant(prompt(16, 1))
    for kind, length in ((0, 20), (1, 16)):
        shelf.store(prompt(length, kind), pool=shelf.slower)
    shelf.leases.saved(1, chain(prompt(16, 1)), 1.0)
    shelf.leases.saved(1, chain(prompt(20)), 1.0)
    shelf.check()
    assert [(lease.state, lease.tier) for lease in (first, second)] == [("kept", 0), ("kept", 1)]


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_stats_name_a_limited_number_of_tenants_the_largest_ones() -> None:
    shelf = Shelf(share=1.0, tenant_share=1.0)
    for kind in range(MAX_TENANTS_SHOWN + 5):
        shelf.grant(prompt(8 if kind % 2 else 4, kind), tenant=f"t{kind}")
    stats = shelf.leases.stats()
    assert len(stats["tenants"]) == MAX_TENANTS_SHOWN
    assert sum(tenant["blocks"] == 2 for tenant in stats["tenants"].values()) == (MAX_TENANTS_SHOWN + 5) // 2
    assert (stats["kept"], stats["degraded_now"], stats["granted"]) == (MAX_TENANTS_SHOWN + 5, 0, MAX_TENANTS_SHOWN + 5)
    assert stats["budget_blocks"] == {"device": 100}


# -- anything, in any order -------------------------------------------------------------------------------------------


@given(st.randoms(use_true_random=False), st.booleans())
@settings(deadline=None, max_examples=60)
def test_whatever_happens_budgets_hold_and_a_kept_prefix_is_there(rng: random.Random, with_host: bool) -> None:
    shelf = Shelf(
        rng.randint(8, 40),
        slower=rng.randint(8, 40) if with_host else 0,
        share=rng.choice([0.3, 0.5, 1.0]),
        tenant_share=rng.choice([0.2, 0.5]),
        max_leases=rng.randint(2, 20),
    )
    prompts = [[rng.randrange(2) for _ in range(rng.randint(1, SIZE * 5))] for _ in range(12)]
    now, promised = 0.0, dict[Lease, tuple[list[int], str, float]]()
    pools = [pool for pool in (shelf.pool, shelf.slower) if pool is not None]
    for _ in range(80):
        now += rng.choice([0.0, 0.5, 5.0])
        shelf.leases.expire(now)
        tokens, salt, tenant, roll = rng.choice(prompts), rng.choice("xy"), rng.choice("abc"), rng.random()
        there = shelf.pool.prefixes.find(salt, pack(tokens), chain(tokens, salt))
        if roll < 0.5 and shelf.pool.available_beside(there) >= len(tokens) // SIZE - len(there):
            lease = shelf.grant(tokens, rng.choice([3.0, 10.0, 60.0]), at=now, tenant=tenant, salt=salt)
            promised[lease] = (tokens, salt, lease.expires_s)
        elif roll < 0.7:
            shelf.use(tokens, at=now, salt=salt)
        elif roll < 0.8:
            shelf.pool.release(shelf.pool.allocate(rng.randint(0, shelf.pool.available)) or [])
        elif roll < 0.85 and there:
            shelf.pool.forget([rng.choice(there)])
            shelf.leases.drop_lost()
        elif roll < 0.9:
            shelf.leases.give_way(now)
        elif shelf.slower is not None:
            digests = chain(tokens, salt)[: len(there)]
            if shelf.slower.available >= len(there):
                shelf.store(tokens[: len(there) * SIZE], salt, shelf.slower)
                shelf.leases.saved(1, digests[-1:], now)
        shelf.check()
        for lease, (content, under, until) in promised.items():
            if lease.state == "kept":
                pool, digests = pools[lease.tier], chain(content, under)
                assert len(pool.prefixes.find(under, pack(content), digests)) == len(digests)
            assert lease.state != "expired" or lease.expires_s <= now
            assert lease.expires_s >= until
    shelf.leases.expire(now + 1000)
    assert len(shelf.leases) == 0
    assert [pool.available for pool in pools] == [pool.num_blocks for pool in pools]
