"""Which prefixes are kept, for whom, and until when: what a client's breakpoint with a time to live becomes.

             grant                    time is up
    --------------> kept -----------------------------> ended
                    |  ^                                  ^
       past a budget|  | used again, and it fits          | time is up
                    v  |                                  |
                  degraded -------------------------------'

    kept      its last full block is pinned, which keeps the blocks above it too. Of the pools that hold it the lowest
              one counts: a prefix that is safe on disk need not be kept on the GPU as well
    degraded  ordinary eviction may take it. The least valuable lease degrades when a budget is exceeded, or when a
              sequence has no other way to get its blocks: a lease never stops an engine

Every later request that begins with a lease's tokens uses it, and renews it from its own arrival.

Pure bookkeeping: no clock (`now` comes in, on the clock of the arrivals), no sequences, no tensors.
engine/leases/claims.py has the leases of each sequence, engine/leases/pins.py where each is pinned, in what budgets.
Used by the engine's loop thread only, but for `stats`, `kept_below` and iteration.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

from engine.leases.pins import Lease, LeaseCounters, Pins, Ranking, take_fingerprint
from engine.pool.blocks import BlockPool
from engine.protocol import TOKEN_BYTES, Tier

DEGRADED = 2.0
"""A degraded lease is worth so much less than a kept one: more than the whole of its time."""

MAX_TENANTS_SHOWN = 32
"""Tenants in `stats`: those that keep the most blocks."""


class Leases:
    """All leases of an engine.

    pools         of its tiers from the fastest, where the model reads and writes, to the slowest
    share         of a pool's blocks that leases keep at most
    tenant_share  of a pool's blocks, and of max_leases, that one tenant has at most
    max_leases    that are remembered, degraded ones included
    """

    def __init__(self, pools: Mapping[Tier, BlockPool], *, share: float, tenant_share: float, max_leases: int) -> None:
        self.counters = LeaseCounters()
        self.last_number = 0  # of a lease, counted from 1
        self._block_bytes = next(iter(pools.values())).block_size * TOKEN_BYTES
        self._max_leases = max_leases
        self._tenant_most = max(1, int(max_leases * tenant_share))
        self._by_tenant: dict[str, dict[Lease, None]] = {}
        self._rankings: dict[str, Ranking[Lease]] = {}  # of the same tenants
        self._ranking: Ranking[Lease] = Ranking(lambda: self, self._value)  # of all
        self._by_digest: dict[bytes, dict[tuple[str, str, bytes], Lease]] = {}  # digest -> salt, tenant, tail
        self._salts = Counter[str]()  # leases of each
        self._size = 0
        self._ends: list[tuple[float, int, Lease]] = []  # heap; a lease may be gone, or end later
        self._revision = 0  # changes when one is renewed, granted or taken over; the pins have their own
        self._pins = Pins(pools, self.counters, share=share, tenant_share=tenant_share)

    # -- numbers ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Leases that are remembered, degraded ones included."""
        return self._size

    def __iter__(self) -> Iterator[Lease]:
        """Over copies; from any thread."""
        return (lease for mine in self._by_tenant.copy().values() for lease in mine.copy())

    def num_blocks(self, tier: int = 0) -> int:
        """Blocks of one pool that leases keep, each once."""
        return self._pins.num_blocks(tier)

    @property
    def revision(self) -> int:
        """Changes with what `kept_below` yields."""
        return self._revision + self._pins.revision

    def any_of(self, salt: str) -> bool:
        """Whether a prompt under this salt may begin with a lease's tokens."""
        return salt in self._salts

    def next_end_s(self) -> float | None:
        """When `expire` may have something to do next; None when there is no lease."""
        return self._ends[0][0] if self._ends else None

    def kept_below(self) -> Iterator[Lease]:
        """The leases that are pinned in the slowest pool, and those too short for that: what an engine needs to know
        that finds the blocks of that pool. From any thread."""
        bottom = len(self._pins.pools) - 1
        return (lease for lease in self if lease.state == "kept" and (lease.tier == bottom or not lease.depth))

    # -- use ----------------------------------------------------------------------------------------------------------

    def find(self, salt: str, tokens: bytes, digests: Sequence[bytes]) -> list[Lease]:
        """The leases whose tokens a prompt begins with, longest first, as far as its digests can be trusted: `read`
        is the one that compares. Changes nothing.

        tokens   token ids of the prompt, TOKEN_BYTES each
        digests  of its leading full blocks
        """
        if salt not in self._salts:
            return []
        by_digest = self._by_digest
        places = [(0, last_digest(salt, ()))]
        places += [(depth, digest) for depth, digest in enumerate(digests, 1) if digest in by_digest]
        found = [
            lease
            for depth, digest in places
            for lease in by_digest.get(digest, {}).values()
            if lease.depth == depth and lease.salt == salt and tokens.startswith(lease.tail, depth * self._block_bytes)
        ]
        return sorted(found, key=lambda lease: -lease.tokens)

    def renew(self, leases: Iterable[Lease], arrived_s: float, after: int = 0) -> None:
        """A request that arrived then uses these leases; those up to number `after` it has renewed already."""
        for lease in leases:
            if lease.number > after:
                lease.expires_s = max(lease.expires_s, arrived_s + lease.ttl_s)
                self.counters.renewed += 1
                self._revision += 1

    def read(self, found: Sequence[Lease], salt: str, tokens: bytes, digests: Sequence[bytes]) -> int:
        """Tokens of the longest lease among `found` whose blocks are there and hold the very tokens of this prompt; 0
        when there is none."""
        if not found:
            return 0
        digests, runs, pools = digests[: found[0].depth], dict[int, list[int]](), self._pins.pools

        def find_run(tier: int) -> list[int]:
            if tier not in runs:
                runs[tier] = pools[tier].prefixes.find(salt, tokens, digests)
            return runs[tier]

        for lease in found:
            if lease.block is not None:
                there = find_run(lease.tier)[lease.depth - 1 : lease.depth] == [lease.block]
            elif lease.state == "degraded":
                there = lease.fingerprint == take_fingerprint(tokens[: lease.tokens * TOKEN_BYTES])
                there = there and any(len(find_run(tier)) >= lease.depth for tier in range(len(pools)))
            else:
                there = True  # it keeps no block
            if there:
                self.counters.read_tokens += lease.tokens
                return lease.tokens
        return 0

    # -- grant --------------------------------------------------------------------------------------------------------

    def grant(
        self,
        tenant: str,
        salt: str,
        tokens: bytes,
        digests: Sequence[bytes],
        ttl_s: float,
        *,
        arrived_s: float,
        now: float,
    ) -> Lease:
        """Keeps a prefix for ttl_s from the arrival of the request that asks for it. A request for the same again
        prolongs the same lease, by the longer of the two times.

        tokens   of the prefix, to the token
        digests  of its full blocks, which are registered in the first pool and are not evicted during this call
        Returns the lease. Less valuable ones make way for it; its state says whether there was room.
        """
        digest, tail = last_digest(salt, digests), tokens[len(digests) * self._block_bytes :]
        lease, fingerprint = self.find_same(tenant, salt, digest, tail), take_fingerprint(tokens)
        if lease is not None and lease.fingerprint != fingerprint:
            self.drop(lease)  # its blocks are gone, and its digest now stands for these tokens
            lease = None
        is_new = lease is None
        if lease is None:
            self.last_number += 1
            lease = Lease(
                tenant,
                salt,
                digest=digest,
                tail=tail,
                fingerprint=fingerprint,
                tokens=len(tokens) // TOKEN_BYTES,
                depth=len(digests),
                ttl_s=ttl_s,
                expires_s=arrived_s + ttl_s,
                number=self.last_number,
            )
            self.counters.granted += 1
            if not self._remember(lease, now):
                return lease
        lease.ttl_s = max(lease.ttl_s, ttl_s)
        lease.expires_s = max(lease.expires_s, arrived_s + lease.ttl_s)
        self._revision += 1
        if lease.state != "kept":
            kept = self._pins.keep(lease, tokens, digests, now, displace=True)
            self.counters.degraded += is_new and not kept
            self.counters.kept_again += kept and not is_new
        return lease

    def keep_again(self, lease: Lease, tokens: bytes, digests: Sequence[bytes], now: float) -> bool:
        """Keeps a degraded lease whose blocks are there again, under the same conditions as `grant`, but only if no
        other one has to make way. False when it does not fit."""
        if lease.state != "degraded" or lease.fingerprint != take_fingerprint(tokens):
            return False
        if not self._pins.keep(lease, tokens, digests, now, displace=False):
            return False
        self.counters.kept_again += 1
        return True

    # -- what makes leases move, degrade and end ----------------------------------------------------------------------

    def give_way(self, now: float) -> bool:
        """Degrades what is worth least in the first pool, so that blocks can be evicted there. False when no lease
        keeps any."""
        return self._pins.give_way(now)

    def saved(self, tier: int, digests: Iterable[bytes], now: float) -> None:
        """These blocks are in that slower pool now as well: leases that end in them are kept there, where there is
        room, and no longer above. One that had no room above may have it there."""
        pool = self._pins.pools[tier]
        for digest in digests:
            leases = list(self._by_digest.get(digest, {}).values())
            block = pool.prefixes.find_block(digest) if leases else None
            if block is None:
                continue
            salt, tokens = pool.prefixes.up_to(block)
            for lease in leases:
                if salt == lease.salt and take_fingerprint(tokens + lease.tail) == lease.fingerprint:
                    self._settle(lease, tier, block, now)  # else the digest stands for something else there

    def _settle(self, lease: Lease, tier: int, block: int, now: float) -> None:
        if lease.block is not None and lease.tier < tier:
            self._pins.move(lease, tier, block, now)
        elif lease.state == "degraded" and lease.expires_s > now:
            self.counters.kept_again += self._pins.pin(lease, tier, block, now, displace=True)

    def restore(self, tier: int, leases: Iterable[Lease], now: float) -> None:
        """Enters leases of an earlier run, whose blocks that pool has taken over. None makes way for another, so the
        most valuable come first. What does not fit is degraded, what is not there any more is lost."""
        for lease in leases:
            self._revision += 1
            if lease.expires_s <= now:
                continue
            there, block = self._pins.find_leaf(lease, tier)
            same = self.find_same(lease.tenant, lease.salt, lease.digest, lease.tail)
            if not there:
                self.counters.lost += 1
            elif same is None:
                self._enter(lease, tier, block, now)
            elif same.fingerprint == lease.fingerprint:  # it was asked for again before the start was over
                same.ttl_s, same.expires_s = max(same.ttl_s, lease.ttl_s), max(same.expires_s, lease.expires_s)
                if block is not None:
                    self._settle(same, tier, block, now)

    def _enter(self, lease: Lease, tier: int, block: int | None, now: float) -> None:
        if self._find_surplus(lease.tenant, now) is not None:
            self.counters.dropped += 1
            return
        self.last_number += 1
        lease.number = self.last_number
        self._add(lease)
        if block is None:
            lease.state = "kept"
        fits = block is None or self._pins.pin(lease, tier, block, now, displace=False)
        self.counters.restored += fits
        self.counters.degraded += not fits

    def drop_lost(self, tier: int = 0) -> int:
        """Degrades the leases whose blocks one pool was made to forget. Call it right after BlockPool.forget. Returns
        how many there were."""
        count = self._pins.drop_lost(tier)
        self.counters.lost += count
        return count

    def purge(self, prefix: str) -> int:
        """Ends the leases of all salts that begin so, before their time. Returns how many there were."""
        gone = [lease for lease in self if lease.salt.startswith(prefix)]
        for lease in gone:
            self.drop(lease)
        self._revision += bool(gone)
        return len(gone)

    def expire(self, now: float) -> int:
        """Ends the leases whose time is up. Returns how many there were. Requests that arrived before `now` come first:
        they may renew one."""
        count = 0
        while self._ends and self._ends[0][0] <= now:
            _, number, lease = heapq.heappop(self._ends)
            if lease not in self._by_tenant.get(lease.tenant, ()):
                continue
            if lease.expires_s > now:  # it was renewed
                heapq.heappush(self._ends, (lease.expires_s, number, lease))
                continue
            self._remove(lease, "expired")
            count += 1
        self.counters.expired += count
        return count

    # -- which there are ----------------------------------------------------------------------------------------------

    def find_same(self, tenant: str, salt: str, digest: bytes, tail: bytes) -> Lease | None:
        """A tenant's lease of exactly this prefix, or None."""
        return self._by_digest.get(digest, {}).get((salt, tenant, tail))

    def _find_surplus(self, tenant: str, now: float) -> Lease | None:
        """The lease that has to go before one of this tenant is added: the least valuable, degraded ones before kept
        ones; the tenant's own when it has too many, any when there are too many; None when there is room."""
        if len(self._by_tenant.get(tenant, ())) >= self._tenant_most:
            return self._rankings[tenant].find_least(now)
        return self._ranking.find_least(now) if self._size >= self._max_leases else None

    def _value(self, lease: Lease, now: float) -> tuple[float, int] | None:
        if lease not in self._by_tenant.get(lease.tenant, ()):
            return None
        share, size = lease.value(now)
        return (share if lease.state == "kept" else share - DEGRADED), size

    def _remember(self, lease: Lease, now: float) -> bool:
        """Enters a new lease. False when there are too many that are worth as much, or when it came too late."""
        if lease.expires_s <= now:
            lease.state = "expired"
            self.counters.expired += 1
            return False
        surplus = self._find_surplus(lease.tenant, now)
        if surplus is not None:
            if surplus.state == "kept" and surplus.value(now) >= lease.value(now):
                self.counters.dropped += 1
                lease.state = "dropped"
                return False
            self.drop(surplus)
        self._add(lease)
        return True

    def _add(self, lease: Lease) -> None:
        tenant = lease.tenant
        if tenant not in self._by_tenant:
            self._by_tenant[tenant] = {}
            self._rankings[tenant] = Ranking(lambda: self._by_tenant[tenant], self._value)
        self._by_tenant[tenant][lease] = None
        self._by_digest.setdefault(lease.digest, {})[lease.salt, tenant, lease.tail] = lease
        self._salts[lease.salt] += 1
        self._size += 1
        heapq.heappush(self._ends, (lease.expires_s, lease.number, lease))

    def drop(self, lease: Lease) -> None:
        """Ends a lease before its time."""
        self.counters.dropped += 1
        self._remove(lease, "dropped")
        if len(self._ends) > 2 * self._size + 64:
            self._ends = [(lease.expires_s, lease.number, lease) for lease in self]
            heapq.heapify(self._ends)

    def _remove(self, lease: Lease, state: Literal["expired", "dropped"]) -> None:
        mine, same = self._by_tenant[lease.tenant], self._by_digest[lease.digest]
        del mine[lease], same[lease.salt, lease.tenant, lease.tail]
        if not same:
            del self._by_digest[lease.digest]
        self._size -= 1
        self._salts[lease.salt] -= 1
        if not self._salts[lease.salt]:
            del self._salts[lease.salt]
        self._pins.unpin(lease)
        lease.state = state
        if not mine:
            del self._by_tenant[lease.tenant], self._rankings[lease.tenant]
            self._pins.drop_tenant(lease.tenant)

    # -- statistics ---------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Values for JSON. May be called from any thread: what it looks at is copied first."""
        leases = list(self)
        kept = sum(lease.state == "kept" for lease in leases)
        most = heapq.nlargest(MAX_TENANTS_SHOWN, self._pins.blocks_by_tenant().items(), key=lambda item: item[1])
        return {
            "kept": kept,
            "degraded_now": len(leases) - kept,
            "blocks": self._pins.blocks_by_tier(),
            "budget_blocks": self._pins.budgets(),
            "tenants": {name: {"blocks": count} for name, count in most},
            **asdict(self.counters),
        }

    def check_invariants(self) -> list[str]:
        """Counts everything anew. Returns what is wrong, in words; empty when nothing is."""
        wrong = self._pins.check_invariants(self)
        for name, counts in (
            ("tenants", [len(mine) for mine in self._by_tenant.values()]),
            ("digests", [len(same) for same in self._by_digest.values()]),
            ("salts", list(self._salts.values())),
        ):
            if sum(counts) != self._size or 0 in counts:
                wrong.append(f"{self._size} leases are remembered, and {sum(counts)} by their {name}")
        if self._size > self._max_leases or any(len(mine) > self._tenant_most for mine in self._by_tenant.values()):
            wrong.append(f"{self._size} leases are remembered, more than the limits of all or of one tenant")
        return wrong


def last_digest(salt: str, digests: Sequence[bytes]) -> bytes:
    """Of the last full block of a prefix; without one, something in its place that no digest can be."""
    return digests[-1] if digests else b"no full block, salt " + salt.encode("utf-8", "surrogatepass")
